"""The GPU engine with every kernel, in Triton's interpreter: its tokens are those of torch's engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.gpu_engine import GpuEngine, StepLimits, largest_step
from services.gpu_worker.planning import Limits, plan_card
from services.gpu_worker.weights.outline import outline
from tests.gpu_worker.engine_loops import run_loop
from tests.gpu_worker.test_worker_process import worker_process
from tests.gpu_worker.tiny_models import Runner, ids_of, prompts, save
from tests.helpers import wait_until
from tests.interpreter import import_triton, interpret

import_triton()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # numpy's, of words that shall wrap
]
CPU = torch.device("cpu")
ROOM = {"kv_cache_bytes": 4 << 20}
SMALL = {"num_hidden_layers": 2}
FEW = {"vocab_size": 40}  # so that a layer is more than logits are
CONTROLS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3},
]  # fmt: skip


def greedy_and_seeded(engine: TorchEngine | GpuEngine) -> list[list[int]]:
    """Several together in chunks; the last one's first two blocks are hits."""
    runner = Runner(engine)
    texts = prompts(len(CONTROLS), seed=3)
    text = prompts(1, low=39)[0]
    before = runner.sequence(text, 1)
    runner.run([before])
    hit = runner.sequence(text, 4, temperature=1.0)
    hit.block_ids[:2] = before.block_ids[:2]
    hit.num_computed = 32
    sequences = [runner.sequence(text, 4, **own) for text, own in zip(texts, CONTROLS, strict=True)]
    return ids_of(runner.run([*sequences, hit], prefill_chunk=13))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "deepseek3"])
def test_tokens_are_those_of_torchs_engine(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(family, tmp_path, **({} if family == "gemma3" else SMALL))
    want = greedy_and_seeded(TorchEngine.load(tmp_path, **ROOM))
    interpret(monkeypatch)
    assert greedy_and_seeded(GpuEngine.load(tmp_path, CPU, **ROOM)) == want


def test_steps_that_overlap_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path, **SMALL)
    texts = prompts(3, seed=5)
    want = run_loop(TorchEngine.load(tmp_path, **ROOM), texts, CONTROLS[:3], 4)
    interpret(monkeypatch)
    assert run_loop(GpuEngine.load(tmp_path, CPU, **ROOM), texts, CONTROLS[:3], 4) == want


def test_float16_stays_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path, **SMALL)
    text = prompts(1, low=30)[0]

    def logits(engine: TorchEngine | GpuEngine) -> torch.Tensor:
        return engine.logits(Chunk(Runner(engine).sequence(text, 1), 0, len(text), True), 0)

    want = logits(TorchEngine.load(tmp_path, **ROOM))
    interpret(monkeypatch)
    got = logits(GpuEngine.load(tmp_path, CPU, dtype="float16", **ROOM))
    assert (got - want).abs().max() < 0.02 * want.abs().max()


class NoCycles(TorchDispatchMode):
    """Frees before each op what the interpreter has left in cycles, where a launch keeps its tensors until Python
    happens to look for them."""

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        gc.collect()
        return func(*args, **(kwargs or {}))


def peak_bytes(run: Callable[[], object]) -> int:
    """What torch has allocated at most, beyond what it had before."""
    gc.collect()
    gc.freeze()  # what is there already need not be looked through again and again
    activities = [torch.profiler.ProfilerActivity.CPU]
    try:
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile, NoCycles():
            run()
    finally:
        gc.unfreeze()
    profiler: Any = profile.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(sizes))


@pytest.mark.parametrize(
    ("family", "tokens", "seqs", "sizes"),
    [
        ("llama", 64, 4, FEW),
        ("llama", 64, 4, FEW | {"intermediate_size": 352}),
        ("llama", 64, 4, {}),
        ("llama", 8, 16, {"vocab_size": 4096}),
        ("qwen3", 64, 4, FEW),
        ("starcoder2-window", 64, 4, FEW | {"intermediate_size": 352}),
        ("mixtral", 64, 4, FEW | {"intermediate_size": 352}),
        ("deepseek2", 64, 4, FEW),
        ("deepseek2", 64, 4, FEW | {"max_position_embeddings": 256}),
    ],
)
def test_the_largest_step_takes_what_is_planned(
    family: str, tokens: int, seqs: int, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of it is a layer's heads, its feed-forward part, ranks of a prompt's tokens, or logits that are drawn from.
    Angles lie there before."""
    save(family, tmp_path, **(SMALL | sizes))
    found = outline(tmp_path)
    plan = plan_card(found, Limits(16, tokens, seqs), 8 << 30)
    interpret(monkeypatch)
    engine = GpuEngine.load(tmp_path, CPU, dtype="float16", **ROOM)
    peak = peak_bytes(partial(largest_step, engine, StepLimits(tokens, seqs, 0.9)))
    assert plan.step_bytes - 4 * plan.max_model_len * found.config.turned == pytest.approx(peak, rel=0.1)


async def test_a_whole_worker_serves_with_every_kernel(tmp_path: Path, redis_url: str) -> None:
    save("llama", tmp_path, **SMALL)
    text = prompts(1, low=12, high=13)[0]
    runner = Runner(TorchEngine.load(tmp_path, block_size=4, **ROOM))
    want = ids_of(runner.run([runner.sequence(text, 3)]))[0]
    settings = {
        "HEADRACE_MODEL": str(tmp_path), "HEADRACE_ENGINE": "auto", "HEADRACE_DEVICE": "cuda", "TRITON_INTERPRET": "1",
        "HEADRACE_KV_CACHE_BYTES": "1MiB",
    }  # fmt: skip
    async with worker_process(redis_url, starts_within_s=120.0, **settings) as worker:
        sid = await worker.bench.place(text, block_ids=range(8), max_tokens=3)
        await wait_until(lambda: worker.is_done(sid), timeout=120)
        assert await worker.bench.log(sid) == want
        members = await worker.bench.records.members()
        assert members["w-process"][0].device == "interpreted"
