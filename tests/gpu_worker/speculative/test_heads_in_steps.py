"""Heads beside a model, through the engine's loop: the text is that without, whatever they guess."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from services.gpu_worker import heads_loading
from services.gpu_worker.batch import Chunk, Engine, Sequence
from services.gpu_worker.composer import Budget
from services.gpu_worker.drafters import make_drafter
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.heads_loading import Heads, heads_of
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.running_set import RunningSet
from services.gpu_worker.sampler import validate
from services.gpu_worker.speculative import draft
from services.gpu_worker.speculative.head_proposer import MAX_KEPT_ROWS, HeadProposer
from services.gpu_worker.speculative.medusa_proposer import MedusaProposer
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.native_eagle import Guess, Wanted
from shared import model_source, settings
from shared.protocol import SamplingParams, TokenChunk
from shared.settings import WorkerSettings
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.any_engine import load_torch
from tests.gpu_worker.engine_loops import run_joining, told_of
from tests.gpu_worker.head_models import load_tiny, load_tiny_gpu, published, published_medusa
from tests.gpu_worker.speculative.test_draft_model_in_steps import CONTROLS, NUM_OUTPUT
from tests.gpu_worker.tiny_models import prompts

CONFIG = SpeculativeConfig(method="eagle3", model="x", num_speculative_tokens=4)


def run(
    engine: Engine, proposer: HeadProposer | MedusaProposer | None, texts: list[list[int]],
    params: list[dict[str, Any]], overlap: bool,
) -> tuple[list[TokenChunk], EngineLoop]:  # fmt: skip
    """As `test_draft_model_in_steps.run`."""
    drafter = ModelSpeculator(CONFIG, proposer, lambda: 0.0) if proposer else None
    running = RunningSet(engine.info, Budget(64, 48, 16), validate, drafter)
    loop = EngineLoop(engine, running, overlap=overlap, clock=lambda: 0.0)
    size = -(-(max(map(len, texts)) + NUM_OUTPUT) // engine.info.block_size)
    blocks = [range(size * n, size * (n + 1)) for n in range(len(texts))]
    run_joining(loop, texts, params, blocks, NUM_OUTPUT)
    return told_of(running, len(texts)), loop


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("load", [load_tiny, load_tiny_gpu], ids=["native", "gpu"])
def test_answers_are_the_same_as_without(
    tmp_path: Path, kind: Literal["eagle", "eagle3", "medusa"], batch: int, load: Any
) -> None:
    """A head with random weights, in files with the published names."""
    engine = load(tmp_path / "model")
    if kind == "medusa":
        published_medusa(tmp_path / "model", tmp_path / "head")
    else:
        published(kind, tmp_path / "model", tmp_path / "head")
    texts = prompts(batch, seed=4, low=10, high=40)
    params = [CONTROLS[(n + batch) % 5] for n in range(batch)]
    want, _ = run(engine, None, texts, params, False)
    proposer = Heads(tmp_path / "head", kind, tmp_path / "model", 16).load(engine)
    proposer._clock = lambda: 0.0
    for overlap in (False, True):
        got, loop = run(engine, proposer, texts, params, overlap)
        assert got == want if load is load_tiny else [c.ids for c in got] == [c.ids for c in want]
        drafter = loop.running.drafting.drafter
        assert isinstance(drafter, ModelSpeculator) and drafter._num_failures == 0
        counts = drafter.counts[CONFIG.method]
        assert counts.num_draft_tokens > 3 * batch
        left = proposer._latest if isinstance(proposer, MedusaProposer) else proposer._read
        assert not left, "everybody has left"


class Oracle:
    """A head that knows the answers, and checks that it is given what the target read for just these tokens."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        self.later_s = self.aside_s = 0.0

    def guess(self, wanted: list[Wanted]) -> list[list[Guess]]:
        found = []
        for own in wanted:
            read = own.seq.token_ids[own.first : own.first + len(own.taps)]
            assert own.taps[:, 0, 0].tolist() == [float(token) for token in read]
            known = next(a for a in self.answers if a[: len(own.seq.token_ids)] == own.seq.token_ids)
            ids = known[len(own.seq.token_ids) :][: own.count]
            found.append([Guess(token, 0.0) for token in ids])
        return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("load", [load_tiny, load_tiny_gpu], ids=["native", "gpu"])
def test_a_head_is_given_each_token_once_and_right_guesses_save_steps(tmp_path: Path, overlap: bool, load: Any) -> None:
    """What the first layer reads are embeddings."""
    engine = load(tmp_path / "model")
    texts = prompts(5, seed=6, low=20, high=60)
    want, slow = run(engine, None, texts, [CONTROLS[n] for n in range(5)], overlap)
    answers = [[*text, *chunk.ids] for text, chunk in zip(texts, want, strict=True)]
    proposer = HeadProposer(Oracle(answers), engine.info.block_size, lambda: 0.0)
    if isinstance(engine, GpuEngine):
        table = engine.decoder.weights.embedding(torch.arange(engine.info.vocab_size))
    else:
        weights = engine.decoder.weights.embedding
        table = torch.empty(weights.rows, 64)
        ids = (ctypes.c_int32 * weights.rows)(*range(weights.rows))
        engine.decoder.native[0].weight_rows(weights.matrix(), ids, weights.rows, table.data_ptr())

    def take(chunks: list[Chunk], taps: torch.Tensor) -> None:
        tokens = torch.cdist(taps[:, 0], table).argmin(-1)
        proposer.take(chunks, tokens.float()[:, None, None])

    engine.tap((0,), take)
    got, loop = run(engine, proposer, texts, [CONTROLS[n] for n in range(5)], overlap)
    drafter = loop.running.drafting.drafter
    assert isinstance(drafter, ModelSpeculator) and drafter._num_failures == 0
    counts = drafter.counts[CONFIG.method]
    assert [c.ids for c in got] == [c.ids for c in want]
    assert counts.accepted.total() > 0.97 * counts.num_draft_tokens > 60
    assert loop.num_steps < 0.7 * slow.num_steps


def sequence(num_tokens: int, blocks: list[int], keys: list[bytes]) -> Sequence:
    params = SamplingParams(max_tokens=9, temperature=0.0, seed=0)
    return Sequence("s", 1, 0, params, num_tokens, list(range(num_tokens)), blocks, keys=keys)


def rows(seq: Sequence, start: int, count: int) -> tuple[list[Chunk], torch.Tensor]:
    tokens = torch.tensor(seq.token_ids[start : start + count], dtype=torch.float32)
    return [Chunk(seq, start, count, False)], tokens[:, None, None]


def proposed(proposer: HeadProposer, seq: Sequence, num_tokens: int = 100) -> tuple[int, ...]:
    return proposer.propose([seq], [2], num_tokens)[0].ids


def test_of_a_cached_prefix_the_rest_is_read_unless_the_head_knows_it() -> None:
    asked: list[Wanted] = []

    class Noting(Oracle):
        def guess(self, wanted: list[Wanted]) -> list[list[Guess]]:
            asked.extend(wanted)
            return super().guess(wanted)

    proposer = HeadProposer(Noting([list(range(60))]), 4, lambda: 0.0)
    first = sequence(11, [5, 6, 7], [b"a", b"b"])
    proposer.take(*rows(first, 0, 10))
    assert proposer.num_behind(first) == 10
    assert proposed(proposer, first, num_tokens=3) == () and asked[-1].count == 0, "it has read four tokens"
    assert proposed(proposer, first) == (11, 12) and (asked[-1].first, asked[-1].base) == (4, 0)
    proposer.forget(first)
    second = sequence(13, [5, 6, 8, 9], [b"a", b"b"])
    proposer.take(*rows(second, 8, 4))
    assert proposed(proposer, second) == (13, 14) and (asked[-1].first, asked[-1].base) == (8, 0)
    other = sequence(13, [1, 2, 3, 4], [b"c", b"d"])
    proposer.take(*rows(other, 8, 4))
    assert proposed(proposer, other) == (13, 14) and (asked[-1].first, asked[-1].base) == (8, 8)


def test_of_whom_something_was_not_kept_is_read_anew_from_the_next_block_on() -> None:
    proposer = HeadProposer(Oracle([list(range(9000))]), 4, lambda: 0.0)
    seq = sequence(8, [5, 6, 7, 8], [])
    proposer.take(*rows(seq, 0, 4))
    proposer.take(*rows(seq, 5, 2))
    assert proposer.num_behind(seq) > 100 and proposed(proposer, seq) == ()
    seq.token_ids += range(8, 11)
    proposer.take(*rows(seq, 7, 3))
    assert proposer.num_behind(seq) == 2 and proposed(proposer, seq) == (11, 12)
    proposer.wants = lambda seq: False
    seq.token_ids.append(11)
    proposer.take(*rows(seq, 10, 1))
    assert proposed(proposer, seq) == () and not proposer.wants_rows(rows(seq, 10, 1)[0])


@pytest.mark.parametrize("reads_before", [False, True])
def test_what_was_kept_of_wrong_drafts_hides_no_token_that_was_not(reads_before: bool) -> None:
    """It would be read in the place of the token, or, where it is gone already, be missed for ever."""
    proposer = HeadProposer(Oracle([list(range(9000))]), 4, lambda: 0.0)
    seq = sequence(8, [5, 6, 7, 8], [])
    proposer.take(*rows(seq, 0, 7))
    assert proposed(proposer, seq) == (8, 9)
    (chunk,), taps = rows(seq, 7, 1)
    wrong = torch.full((3, 1, 1), 77.0)
    proposer.take([replace(chunk, draft=draft.chain([77, 77, 77]))], torch.cat((taps, wrong)))
    seq.token_ids.append(8)
    if reads_before:
        assert proposed(proposer, seq) == (9, 10)
    seq.token_ids.append(9)  # of a step that was not kept
    assert proposer.num_behind(seq) > 100
    for number in range(9, 13):
        assert proposed(proposer, seq) == ()
        seq.token_ids.append(number + 1)
        proposer.take(*rows(seq, number, 1))
    assert proposed(proposer, seq) == (14, 15), "from the next block on it is read again"


def test_drafts_that_were_right_are_read() -> None:
    proposer = HeadProposer(Oracle([list(range(9000))]), 4, lambda: 0.0)
    seq = sequence(8, [5, 6, 7, 8], [])
    seq.token_ids += (8, 9)
    (chunk,), taps = rows(seq, 0, 10)
    proposer.take([replace(chunk, count=8, draft=draft.chain([8, 9, 77]))], torch.cat((taps, taps[:1])))
    seq.token_ids.append(10)
    assert proposed(proposer, seq) == (11, 12)


def test_nothing_is_kept_for_a_request_that_wants_no_guesses() -> None:
    proposer = HeadProposer(Oracle([list(range(9000))]), 4, lambda: 0.0)
    seq = sequence(8, [5, 6, 7, 8], [])
    seq.params = seq.params.model_copy(update={"num_speculative_tokens": 0})
    chunks, taps = rows(seq, 0, 7)
    proposer.take(chunks, taps)
    assert not proposer._read and not proposer.wants_rows(chunks)


def test_who_has_another_block_has_no_guesses() -> None:
    proposer = HeadProposer(Oracle([list(range(9000))]), 4, lambda: 0.0)
    moved = sequence(11, [1, 2, 3], [])
    proposer.take(*rows(moved, 0, 10))
    assert proposed(proposer, moved, num_tokens=6) == ()
    moved.block_ids[0] = 4
    assert proposed(proposer, moved) == ()


def test_what_is_kept_is_bounded() -> None:
    proposer = HeadProposer(Oracle([list(range(9000))]), 4, lambda: 0.0)
    seq = sequence(8500, list(range(2200)), [])
    for start in range(0, 8400, 100):
        proposer.take(*rows(seq, start, 100))
        assert proposer._read["s"].num_kept <= MAX_KEPT_ROWS
    assert proposed(proposer, seq) == () and proposer.num_behind(seq) > 10_000


def test_what_is_kept_of_a_step_does_not_keep_the_rest_of_it() -> None:
    """A sequence of which a token is kept, step by step, beside a prompt that another one brings: but for the latest
    step, if that is small."""
    proposer = HeadProposer(Oracle([list(range(99))]), 4, lambda: 0.0)
    seq = sequence(40, list(range(20)), [])
    for num_others, num_exact in ((30, 7), (300, 8)):
        other = sequence(num_others + 1, list(range(20, 120)), [])
        other.sid = "other"
        for start in range(8):
            (mine,), taps = rows(seq, start, 1)
            prompt, more = rows(other, 0, num_others)
            proposer.take([mine, *prompt], torch.cat((taps, more)))
        proposer.forget(other)
        kept = [tensor for _, tensor in proposer._read["s"].kept]
        assert sum(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept) == num_exact
        proposer.forget(seq)


def test_heads_are_loaded_as_the_configuration_names_them(tmp_path: Path) -> None:
    engine = load_tiny(tmp_path / "model")
    published("eagle3", tmp_path / "model", tmp_path / "head")

    def asked(text: str) -> Heads | None:
        own = settings.load(WorkerSettings, {"HEADRACE_SPECULATIVE_CONFIG": text})
        return heads_of(own, tmp_path / "model", tmp_path)

    heads = asked(f'{{"method": "eagle3", "model": "{tmp_path / "head"}"}}')
    assert heads is not None and heads.block_bytes() == heads.block_size * 2 * 2 * 16 * 2
    assert isinstance(make_drafter(CONFIG, engine, heads.load(engine), 0.1), ModelSpeculator)
    with pytest.raises(ConfigError, match="speculative_config: model: is missing; only smollm2-135m-instruct"):
        asked('{"method": "eagle3"}')
    assert asked('{"method": "suffix"}') is None and asked("none") is None
    with pytest.raises(ConfigError, match=r"method: eagle3 computes on a GPU or with native kernels only"):
        heads.load(load_torch(tmp_path / "model", kv_cache_bytes=8 << 20))
    wrong = asked(f'{{"method": "eagle", "model": "{tmp_path / "head"}"}}')
    assert wrong is not None
    with pytest.raises(ConfigError, match=r"speculative_config: model: draft_vocab_size"):
        wrong.block_bytes()


def test_heads_that_only_come_along_stop_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` has asked for none: where they do not fit, or cannot compute, it does without."""
    ((name, known),) = model_source.KNOWN.items()
    model = tmp_path / known.file_name  # another, with its name
    engine = load_tiny(model)

    def asked(method: str, **other: str) -> Heads | None:
        return heads_of(WorkerSettings(speculative_config=f'{{"method": "{method}"}}', **other), model, tmp_path)

    assert asked("auto") is None
    published("eagle3", model, tmp_path / name)
    monkeypatch.setattr(heads_loading, "PACKAGED", tmp_path)
    assert asked("auto", engine="torch") is None
    heads, by_name, torch_engine = asked("auto"), asked("eagle3"), load_torch(model, kv_cache_bytes=8 << 20)
    assert heads is not None and by_name is not None
    assert heads.load_if_possible(engine) is not None and heads.load_if_possible(torch_engine) is None
    with pytest.raises(ConfigError, match="computes on a GPU or with native kernels"):
        by_name.load_if_possible(torch_engine)


def test_a_head_that_comes_along_and_fails_stops_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails of: a kernel that does not compile is no error of its files."""

    def load(heads: Heads, engine: Engine) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(Heads, "load", load)
    engine: Any = None
    assert Heads(tmp_path, "eagle3", tmp_path, 16, comes_along=True).load_if_possible(engine) is None
    with pytest.raises(RuntimeError):
        Heads(tmp_path, "eagle3", tmp_path, 16).load_if_possible(engine)


def test_a_first_guess_and_those_behind_it_have_costs_of_their_own() -> None:
    """The head says what the later ones took; the rest, with all that is done around them, is the first's, but for what
    it does once."""
    now_s = [0.0]

    class Slow(Oracle):
        def guess(self, wanted: list[Wanted]) -> list[list[Guess]]:
            places = max(own.count for own in wanted)
            self.later_s, self.aside_s = 0.001 * (places - 1), 0.5
            now_s[0] += 0.004 + self.later_s + self.aside_s
            return super().guess(wanted)

    proposer = HeadProposer(Slow([list(range(60))]), 4, lambda: now_s[0])
    seq = sequence(6, list(range(20)), [])
    proposer.take(*rows(seq, 0, 5))
    proposer.propose([seq], [1], 100)
    assert [proposer.seconds(1, n) for n in (1, 3)] == pytest.approx([0.004, 0.008])
    for count in (3, 2):
        seq.token_ids.append(len(seq.token_ids))
        proposer.take(*rows(seq, len(seq.token_ids) - 2, 1))
        proposer.propose([seq], [count], 100)
        assert [proposer.seconds(1, n) for n in (1, 2, 5)] == pytest.approx([0.004, 0.005, 0.008])
