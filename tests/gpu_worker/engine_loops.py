"""An engine driven as a worker drives it: steps by its loop, who runs by a running set."""

from __future__ import annotations

from typing import Any

from services.gpu_worker.batch import Engine
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.sampler import validate
from tests.gpu_worker.builders import make_admission, make_admit


def run_loop(
    engine: Engine, texts: list[list[int]], params: list[dict[str, Any]], num_tokens: int, overlap: bool = True
) -> list[list[int]]:
    """One joins every second step; what each has drawn."""
    running = RunningSet(engine.info, Budget(64, 16, 16), validate)
    loop = EngineLoop(engine, running, overlap=overlap)
    for number, (text, own) in enumerate(zip(texts, params, strict=True)):
        admit = make_admit(f"r{number}.0", block_ids=range(8 * number, 8 * number + 8))
        loop.submit(Change("run", 1, admit, make_admission(text, max_tokens=num_tokens, **own)))
        loop.step_once()
        loop.step_once()
    while loop.step_once():
        pass
    accounts = {a.seq.sid: a.seq for a in running.ledger._accounts.values()}
    sequences = [accounts[f"r{n}.0"] for n in range(len(texts))]
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences]
