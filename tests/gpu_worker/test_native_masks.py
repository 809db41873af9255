"""What grammars allow is told to a native step while it runs: it draws what torch draws, whatever runs beside."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.native.library import Pool
from services.gpu_worker.admission import Answered
from services.gpu_worker.batch import Answer, Chunk
from services.gpu_worker.composer import Budget
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.grammar import GrammarError, Grammars
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.native_inputs import build_native_inputs
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.sampler import Draw, apply_controls, sample, validate
from services.gpu_worker.speculative.verify import draws_of
from services.gpu_worker.step_inputs import SequenceError
from shared.protocol import Constraint, SamplingParams, TokenChunk
from shared.vocabulary import Vocabulary
from shared.wire import decode_as
from shared.worker_protocol import Cancel
from tests.gpu_worker.any_engine import engine_threads, load_native
from tests.gpu_worker.builders import Allows, make_admission, make_admit
from tests.gpu_worker.guesses import CHAINS, run_with_drafts
from tests.gpu_worker.test_grammar import by_lark
from tests.gpu_worker.tiny_models import Runner, build, prompts, save
from tests.kernels.native_libraries import ISAS, library_for

VOCAB_SIZE = 9001  # draws of several pieces; the last words of a mask, and the last tile, are not whole
NUM_TOKENS = 24
END = 9000
HELD = by_lark(r"start: /[a-m]{5,8}( [n-z]+){2}[0-9a-f ]*/")
CONTROLS: list[dict[str, Any]] = [
    {"constraint": HELD}, {"constraint": HELD, "temperature": 1.0, "seed": 7}, {"temperature": 1.0, "seed": 7},
    {"constraint": HELD, "temperature": 0.4, "seed": 1 << 40}, {"constraint": Constraint(bad_words=((3,), (4, 5)))},
]  # fmt: skip
BY_THE_HOST: list[dict[str, Any]] = [
    {"constraint": HELD, "temperature": 1.0, "seed": 7, "logprobs": 2}, {"constraint": HELD, "repetition_penalty": 1.2},
    {"constraint": HELD, "temperature": 0.9, "seed": 3, "top_p": 0.8},
]  # fmt: skip


def random_words() -> Vocabulary:
    chance = random.Random(1)
    tokens = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz 0123456789", k=1 + n % 4)) for n in range(END)]
    return Vocabulary([*(token.encode() for token in tokens), b""], frozenset({END}))


GRAMMARS = Grammars(random_words)


class FailsAfter(Allows):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(None)
        self._num_tokens = num_tokens

    def mask_after(self, output_ids: Seq[int]) -> bytes | None:
        if len(output_ids) >= self._num_tokens:
            raise GrammarError("the grammar is too complex")
        return None


def mask_of(allowed: Seq[int], num_bytes: int = VOCAB_SIZE // 8 + 1) -> bytes:
    return sum(1 << int(i) for i in set(allowed)).to_bytes(num_bytes, "little")


def bits_of(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save("llama", path, vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> NativeEngine:
    return load_native(folder, kv_cache_bytes=8 << 20)


def random_masks(seed: int) -> list[bytes | None]:
    chance = np.random.default_rng(seed)
    shares = [chance.random(VOCAB_SIZE) < share for share in (0.999, 0.5, 0.01, 0.0005)]
    few = [[0], [VOCAB_SIZE - 1], [31, 32], [4095, 4096], [*range(8992, VOCAB_SIZE)], [*range(4000)]]
    masks = [mask_of([*np.flatnonzero(share), int(chance.integers(VOCAB_SIZE))]) for share in shares]
    short, longer = mask_of(range(0, 3000, 7), 376), mask_of([5, 8000, VOCAB_SIZE + 3], 2000)
    return [*masks, *map(mask_of, few), None, short, longer]


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.7])
def test_a_step_draws_what_torch_draws_of_what_is_allowed(folder: Path, isa: Any, temperature: float) -> None:
    engine = NativeEngine.load(folder, library_for(isa), num_threads=2, kv_cache_bytes=8 << 20)
    runner, masks = Runner(engine), random_masks(int(10 * temperature)) * 2
    random.Random(0).shuffle(masks)
    texts = prompts(len(masks), seed=2, vocab_size=VOCAB_SIZE)
    chunks = []
    for n, (text, mask) in enumerate(zip(texts, masks, strict=True)):
        seq = runner.sequence(text, 4, choice=n, temperature=temperature, seed=n << 33 | n, constraint=HELD)
        seq.answer = Allows(mask)
        chunks.append(Chunk(seq, 0, len(text), sample=True))
    inputs = build_native_inputs(chunks, engine._geometry)
    assert inputs.masked == inputs.sample_chunks and not inputs.host_samples
    logits, free = engine.decoder.forward(inputs)
    with torch.inference_mode():
        want = sample(logits, draws_of(chunks, inputs.sample_chunks))
    assert engine.step(chunks) == engine.begin(chunks).results() == [(token,) for token in want]
    assert len({token.token_id for token in want} - set(free)) > 5, "the masks change what is drawn"
    assert [engine.step([chunk])[0] for chunk in chunks] == [(token,) for token in want]


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 64, 1000, VOCAB_SIZE])
def test_what_the_host_draws_from_is_forbidden_as_torch_forbids_it(isa: Any, vocab_size: int) -> None:
    """Whatever of a mask is longer than the model's vocabulary, or shorter, and beside bans and penalties."""
    native = (library_for(isa), Pool(library_for(isa), 1))
    for n, mask in enumerate(random_masks(vocab_size)):
        asked = SamplingParams(max_tokens=9, seed=1, constraint=HELD, logit_bias={0: -1.0}, repetition_penalty=1.2)
        draw = Draw(asked, 0, [0, *range(0, vocab_size, 3)], 1, answer=Allows(mask))
        row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(n))
        before = row.clone()
        want = apply_controls(row, draw)
        assert torch.equal(apply_controls(row, draw, native), want)
        assert torch.equal(row, before)
        assert mask is None or bool(want.isneginf().any()) == (set(range(vocab_size)) - set(bits_of(mask)) != set())


def test_ties_go_to_the_lowest_token_that_is_allowed(tmp_path: Path) -> None:
    model = build("llama")
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=1 << 20)
    for allowed in ([17, 40], [299], [40, 41]):
        seq = Runner(engine).sequence([1, 2, 3], 3, constraint=HELD)
        seq.answer = Allows(mask_of(allowed))
        assert engine.step([Chunk(seq, 0, 3, True)])[0][0].token_id == allowed[0]


def test_where_the_model_has_none_of_the_allowed_tokens_its_sequence_ends(engine: NativeEngine) -> None:
    seq = Runner(engine).sequence([1, 2, 3], 3, constraint=HELD)
    seq.answer = Allows(mask_of([VOCAB_SIZE + 1], 2000))
    with pytest.raises(SequenceError):
        engine.step([Chunk(seq, 0, 3, True)])


def run_held(
    engine: NativeEngine, texts: list[list[int]], params: list[dict[str, Any]], *, overlap: bool = True,
    answers: dict[int, Answer] | None = None, cancelled: int = -1,
) -> list[list[int]]:  # fmt: skip
    """One joins every second step. cancelled: leaves after some."""
    running = RunningSet(engine.info, Budget(64, 16, 16), validate)
    loop = EngineLoop(engine, running, overlap=overlap)
    given = answers or {}
    for n, (text, own) in enumerate(zip(texts, params, strict=True)):
        own = {"max_tokens": NUM_TOKENS, "stop_token_ids": (END,)} | own
        loop.submit(
            Change("run", 1, make_admit(f"r{n}.0", block_ids=range(8 * n, 8 * n + 8)), make_admission(text, **own))
        )
        if "constraint" in own:
            made = given[n] if n in given else GRAMMARS.begin(own["constraint"], [END])
            loop.submit(Answered(f"r{n}.0", 1, made))
        loop.step_once()
        loop.step_once()
    if cancelled >= 0:
        loop.submit(Change("run", 1, Cancel(sid=f"r{cancelled}.0", epoch=1)))
    while loop.step_once():
        pass
    told = {e.sid: decode_as(TokenChunk, e.chunk) for e in running.ledger.build().entries if e.chunk}
    return [list(told[f"r{n}.0"].ids) if f"r{n}.0" in told else [] for n in range(len(texts))]


@pytest.fixture(scope="module")
def load() -> tuple[list[list[int]], list[dict[str, Any]]]:
    params = CONTROLS * 2
    return prompts(len(params), seed=5, vocab_size=VOCAB_SIZE), params


@pytest.fixture(scope="module")
def alone(engine: NativeEngine, load: tuple[list[list[int]], list[dict[str, Any]]]) -> list[list[int]]:
    return [run_held(engine, [text], [own])[0] for text, own in zip(*load, strict=True)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapping", "one by one"])
def test_answers_are_those_of_each_alone(
    engine: NativeEngine, load: Any, alone: list[list[int]], overlap: bool, threads: int
) -> None:
    texts, params = load
    with engine_threads(engine, threads):
        assert run_held(engine, texts, params, overlap=overlap) == alone
        mixed = run_held(engine, [*texts, *texts[:3]], [*params, *BY_THE_HOST], overlap=overlap)
    assert mixed[: len(alone)] == alone
    words = random_words().tokens
    for own, ids in zip([*params, *BY_THE_HOST], mixed, strict=True):
        if own.get("constraint") is HELD:
            assert GRAMMARS.begin(HELD, [END]).allows(ids), b"".join(words[i] for i in ids)


def test_log_probabilities_change_no_token(engine: NativeEngine, load: Any, alone: list[list[int]]) -> None:
    """With them the host draws."""
    texts, params = load
    assert run_held(engine, texts, [own | {"logprobs": 1} for own in params]) == alone


def test_steps_of_held_answers_overlap(engine: NativeEngine, load: Any) -> None:
    texts, params = load
    runner = Runner(engine)
    sequences = [runner.sequence(text, 4, **own) for text, own in zip(texts[:2], params[:2], strict=True)]
    for seq in sequences:
        seq.answer = GRAMMARS.begin(HELD, [END])
    step = engine.begin([Chunk(s, 0, len(s.token_ids), True) for s in sequences])
    assert step.may_be_followed
    step.results()


@pytest.mark.parametrize("kind", CHAINS)
def test_drafts_change_no_token(engine: NativeEngine, load: Any, alone: list[list[int]], kind: str) -> None:
    runner, sequences, known = Runner(engine), [], {}
    for text, own, ids in zip(*load, alone, strict=True):
        seq = runner.sequence(text, len(ids), stop_token_ids=(END,), **own)
        seq.answer = GRAMMARS.begin(own["constraint"], [END]) if "constraint" in own else None
        sequences.append(seq)
        known[id(seq)] = ids
    got, _ = run_with_drafts(runner, sequences, CHAINS[kind](known, VOCAB_SIZE), prefill_chunk=13)
    assert [[t.token_id for t in tokens] for tokens in got] == alone


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_an_answer_that_cannot_go_on_ends_alone(
    engine: NativeEngine, load: Any, alone: list[list[int]], num_tokens: int
) -> None:
    """The step after it has begun already."""
    texts, params = load
    answers: dict[int, Answer] = {3: FailsAfter(num_tokens)}
    got = run_held(engine, texts, params, answers=answers)
    assert len(got[3]) == num_tokens
    assert got[:3] + got[4:] == alone[:3] + alone[4:]


def test_one_that_is_cancelled_leaves_the_others_as_they_are(
    engine: NativeEngine, load: Any, alone: list[list[int]]
) -> None:
    got = run_held(engine, *load, cancelled=8)
    assert got[:8] + got[9:] == alone[:8] + alone[9:]


def test_a_decoder_ends_while_a_step_waits_to_be_told(engine: NativeEngine, folder: Path) -> None:
    own = load_native(folder, kv_cache_bytes=1 << 20)
    seq = Runner(own).sequence([1, 2, 3], 3, constraint=HELD)
    seq.answer = Allows(mask_of([7]))
    chunks = [Chunk(seq, 0, 3, sample=True)]
    step = own.begin(chunks)
    own.decoder.set_num_threads(2)  # ends the runner and its pool
    assert step.run.drawn[0] != 7
    assert own.step(chunks)[0][0].token_id == 7
