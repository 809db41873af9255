"""An engine driven as a worker drives it: steps by its loop, who runs by a running set."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from services.gpu_worker.batch import Engine
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.sampler import validate
from services.gpu_worker.speculative.row_cost import RowCost
from shared.protocol import TokenChunk
from shared.wire import decode_as
from tests.gpu_worker.builders import make_admission, make_admit


class FreeRows(RowCost):
    """So that what is drafted does not depend on the clock."""

    def relative(self, num_rows: int) -> float:
        return 1.0


def run_together(
    loop: EngineLoop, texts: Seq[list[int]], params: Seq[dict[str, Any]], blocks: Seq[Seq[int]], num_tokens: int
) -> None:
    """As `run_joining`, all from the first step on."""
    for n in range(len(texts)):
        _submit(loop, n, texts[n], {"max_tokens": num_tokens} | params[n], blocks[n])
    while loop.step_once():
        pass


def run_joining(
    loop: EngineLoop, texts: Seq[list[int]], params: Seq[dict[str, Any]], blocks: Seq[Seq[int]], num_tokens: int
) -> None:
    """One joins every second step, with blocks of its own; until all have ended. num_tokens: of whom asks for no other
    number."""
    for n, (text, own, block_ids) in enumerate(zip(texts, params, blocks, strict=True)):
        _submit(loop, n, text, {"max_tokens": num_tokens} | own, block_ids)
        loop.step_once()
        loop.step_once()
    while loop.step_once():
        pass


def _submit(loop: EngineLoop, n: int, text: list[int], params: dict[str, Any], block_ids: Seq[int]) -> None:
    loop.submit(Change("run", 1, make_admit(f"r{n}.0", block_ids=block_ids), make_admission(text, **params)))


def told_of(running: RunningSet, num_sequences: int) -> list[TokenChunk]:
    """What would be committed of each that has ended."""
    chunks = {e.sid: decode_as(TokenChunk, e.chunk) for e in running.ledger.build().entries}
    return [chunks[f"r{n}.0"] for n in range(num_sequences)]


def run_loop(
    engine: Engine, texts: list[list[int]], params: list[dict[str, Any]], num_tokens: int, overlap: bool = True
) -> list[list[int]]:
    """One joins every second step; what each has drawn."""
    running = RunningSet(engine.info, Budget(64, 16, 16), validate)
    loop = EngineLoop(engine, running, overlap=overlap)
    run_joining(loop, texts, params, [range(8 * n, 8 * n + 8) for n in range(len(texts))], num_tokens)
    accounts = {a.seq.sid: a.seq for a in running.ledger._accounts.values()}
    sequences = [accounts[f"r{n}.0"] for n in range(len(texts))]
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences]
