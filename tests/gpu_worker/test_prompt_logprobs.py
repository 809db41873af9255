"""How likely a prompt's own tokens are: the same numbers from every engine as from the logits themselves, however the
prompt is cut, whoever runs beside it, and where a worker takes over half way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import log_sums
from services.gpu_worker.batch import Chunk, SampledToken, Sequence
from services.gpu_worker.composer import MAX_SCORES, Budget, compose
from services.gpu_worker.device_sampler import _ranks, draw
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.sampler import Draw, sample
from shared.protocol import SamplingParams
from tests.gpu_worker.any_engine import load_native, load_torch
from tests.gpu_worker.tiny_models import VOCAB_SIZE, Runner, prompts, save

ROOM = {"kv_cache_bytes": 16 << 20}
PROMPT = prompts(1, seed=4, low=150, high=160)[0]
LOADERS: dict[str, Callable[..., Any]] = {
    "torch": load_torch, "native": load_native,
    "gpu": lambda path, **settings: GpuEngine.load(path, torch.device("cpu"), **settings),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save("llama", path)
    return path


@pytest.fixture(scope="module", params=list(LOADERS))
def engine(request: pytest.FixtureRequest, folder: Path) -> Any:
    return LOADERS[request.param](folder, **ROOM)


@pytest.fixture(scope="module", params=["torch", "native"])
def exact(request: pytest.FixtureRequest, folder: Path) -> Any:
    """One whose rows have the same bits in any company; what stands in for a GPU's kernels on a CPU is none."""
    return LOADERS[request.param](folder, **ROOM)


def run(engine: Any, sequences: list[Sequence], num_batched_tokens: int = 512) -> list[list[SampledToken]]:
    """All that is told of each: of its prompt's tokens, then of those that it draws."""
    told: list[list[SampledToken]] = [[] for _ in sequences]
    budget = Budget(num_batched_tokens, 16, num_batched_tokens)

    def is_open(s: Sequence) -> bool:
        return s.is_scoring or s.num_output_tokens < s.params.max_tokens

    while ready := [s for s in sequences if is_open(s)]:
        chunks = compose(ready, budget, block_size=16, max_prefill_tokens=num_batched_tokens, turn=0)
        for chunk, tokens in zip(chunks, engine.step(chunks), strict=True):
            seq, num_scored = chunk.seq, len(chunk.scored)
            told[next(i for i, s in enumerate(sequences) if s is seq)] += tokens
            seq.num_computed += chunk.count
            seq.token_ids += [t.token_id for t in tokens[num_scored:]]
    return told


def expected(engine: Any, num_top: int) -> list[SampledToken]:
    """From the logits of the whole prompt, in double precision."""
    seq = Runner(engine).sequence(PROMPT, 1)
    logits = engine.logits(Chunk(seq, 0, len(PROMPT), True), 0).double()
    told = []
    for row, token_id in zip(logits.log_softmax(-1), PROMPT[1:], strict=False):
        best = row.topk(num_top)
        rank = int((row > row[token_id]).sum()) + 1
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        told.append(SampledToken(token_id, float(row[token_id]), top, rank))
    return told


def test_they_are_those_of_the_logits(engine: Any) -> None:
    seq = Runner(engine).sequence(PROMPT, 2, prompt_logprobs=3, logprobs=1)
    [told] = run(engine, [seq])
    wanted = expected(engine, 3)
    assert len(told) == len(PROMPT) - 1 + 2
    for got, want in zip(told, wanted, strict=False):
        assert (got.token_id, got.rank) == (want.token_id, want.rank)
        assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert [t for t, _ in got.top] == [t for t, _ in want.top]
        assert [p for _, p in got.top] == pytest.approx([p for _, p in want.top], abs=1e-4)
    plain = Runner(engine).sequence(PROMPT, 2, logprobs=1)
    assert [t.token_id for t in run(engine, [plain])[0]] == [t.token_id for t in told[-2:]]
    assert [t.rank for t in told[-2:]] == [0, 0]


@pytest.mark.parametrize("num_batched_tokens", [1, 7, 40, 512])
def test_neither_chunks_nor_neighbours_change_a_bit(exact: Any, num_batched_tokens: int) -> None:
    def asking(runner: Runner, **fields: Any) -> Sequence:
        return runner.sequence(PROMPT[:90], 2, prompt_logprobs=2, **fields)

    [alone] = run(exact, [asking(Runner(exact))])
    runner = Runner(exact, seed=num_batched_tokens)
    others = [runner.sequence(p, 5, temperature=1.0, logprobs=1) for p in prompts(3, seed=9)]
    company = [others[0], asking(runner), others[1], asking(runner, temperature=0.7, seed=5), others[2]]
    told = run(exact, company, num_batched_tokens)
    assert told[1] == alone
    assert told[3][:89] == alone[:89]


@pytest.mark.parametrize("num_known", [0, 1, 50, 89])
def test_what_is_known_already_is_not_computed_again(exact: Any, num_known: int) -> None:
    [whole] = run(exact, [Runner(exact).sequence(PROMPT[:90], 1, prompt_logprobs=2)])
    rest = Runner(exact).sequence(PROMPT[:90], 1, prompt_logprobs=2)
    rest.score_from = num_known
    assert run(exact, [rest]) == [whole[num_known:]]


def test_a_prompt_that_nothing_is_drawn_after(exact: Any) -> None:
    [whole] = run(exact, [Runner(exact).sequence(PROMPT[:90], 1, prompt_logprobs=0)])
    seq = Runner(exact).sequence(PROMPT[:90], 1, prompt_logprobs=0)
    seq.params = seq.params.model_copy(update={"max_tokens": 0})
    assert run(exact, [seq]) == [whole[:89]]
    assert seq.num_computed == 89


def test_every_token_has_a_rank_of_its_own(engine: Any) -> None:
    runner = Runner(engine)
    sequences = [runner.sequence([*PROMPT[:3], token_id], 1, prompt_logprobs=0) for token_id in range(VOCAB_SIZE)]
    for seq in sequences:
        seq.params, seq.score_from = seq.params.model_copy(update={"max_tokens": 0}), 2
    told = run(engine, sequences)
    assert sorted(tokens[0].rank for tokens in told) == list(range(1, VOCAB_SIZE + 1))


def test_of_equal_tokens_the_lower_id_ranks_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5]] * 5)
    params = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0)
    draws = [Draw(params, 0, (), 0, target=token_id) for token_id in range(5)]
    assert [t.rank for t in sample(logits, draws)] == [2, 1, 3, 4, 5]
    assert [t.rank for t in draw(logits, draws).wait() if t] == [2, 1, 3, 4, 5]


class LargestMade(TorchDispatchMode):
    """How many elements the largest array has that an operation makes; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.num_elements = max(self.num_elements, out.numel())
        return out


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(100, 10), (300, 3), (1500, 1)])
def test_many_rows_of_a_large_vocabulary_are_scored_in_parts(
    vocab_size: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(MAX_SCORES, vocab_size, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=3)
    draws = [Draw(params, 0, (), 0, target=(7 * n) % vocab_size) for n in range(MAX_SCORES)]
    whole = draw(logits.clone(), draws).wait()
    assert sample(logits, draws) == whole
    monkeypatch.setattr(log_sums, "MAX_ELEMENTS", 1000)
    with LargestMade() as made:
        sums = log_sums.log_sums(logits, 3)
        ranks = _ranks(logits, torch.zeros(MAX_SCORES, dtype=torch.int64), logits[:, :1])
    assert made.num_elements == max(num_rows * vocab_size, 3 * MAX_SCORES)
    assert draw(logits.clone(), draws).wait() == whole
    assert sums.totals.shape == ranks.shape == (MAX_SCORES,)


def test_the_torch_engine_makes_no_copy_of_its_logits(folder: Path) -> None:
    """Nor anything else so large, beside the logits and what says which of them are not finite."""
    logits = torch.randn(MAX_SCORES, 5000)
    engine = load_torch(folder, **ROOM)
    seq = Runner(engine).sequence(PROMPT[:65], 1)
    seq.params = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=3)
    with pytest.MonkeyPatch.context() as patch, LargestMade() as made:
        patch.setattr(engine._decoder, "forward", lambda inputs, pool: logits)
        engine.step([Chunk(seq, 0, 64, False)])
    assert made.num_elements == 5000
