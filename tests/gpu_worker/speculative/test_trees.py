"""Trees of drafts on the native engine: tokens, log-probabilities and what is left in the pool are those without."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.batch import Chunk, SampledToken, Sequence
from services.gpu_worker.grammar import AnswerState
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative.draft import ROOT, Draft, chain
from services.gpu_worker.speculative.verify import drawn_by_chunk, draws_of
from services.gpu_worker.step_inputs import SequenceError
from tests.gpu_worker.any_engine import engine_threads, load_native, load_torch
from tests.gpu_worker.builders import make_sequence
from tests.gpu_worker.guesses import TREES, run_in_batches, run_with_drafts
from tests.gpu_worker.speculative.test_verify import CONTROLS, NUM_OUTPUT, PROMPTS, VOCAB_SIZE
from tests.gpu_worker.test_grammar import begin, by_schema, ids
from tests.gpu_worker.tiny_models import Runner, save

STORES: dict[str, dict[str, Any]] = {
    "halves": {"block_size": 8},
    "bytes": {"block_size": 16, "kv_cache_dtype": "int8"},
    "single slots": {"block_size": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save("llama", folder, vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=200)
    return folder


@pytest.fixture(scope="module", params=STORES)
def engine(request: pytest.FixtureRequest, folder: Path) -> NativeEngine:
    return load_native(folder, kv_cache_bytes=16 << 20, **STORES[request.param])


def sequences(runner: Runner) -> list[Sequence]:
    return [runner.sequence(p, NUM_OUTPUT, i % 3, **CONTROLS[i % 8]) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def alone(engine: NativeEngine) -> list[list[SampledToken]]:
    """Every request by itself, token by token."""
    runner = Runner(engine)
    return [runner.run([s])[0] for s in sequences(runner)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("kind", TREES)
def test_tokens_are_those_without_drafts(
    engine: NativeEngine, alone: list[list[SampledToken]], kind: str, batch: int, threads: int
) -> None:
    """Penalties, min_tokens, bans and log-probabilities too: see CONTROLS."""
    with engine_threads(engine, threads):
        runner = Runner(engine, seed=batch)
        own = sequences(runner)
        guess = TREES[kind]({id(s): [t.token_id for t in w] for s, w in zip(own, alone, strict=True)}, VOCAB_SIZE)
        got, num_steps = run_in_batches(runner, own, guess, batch)
        assert got == alone
    if kind != "random tree":
        assert num_steps <= 0.7 * NUM_OUTPUT * len(own) / batch + 3 * len(own) / batch


def test_what_was_right_lies_in_the_slots_of_its_positions(engine: NativeEngine) -> None:
    """As far as a block could be sealed, the pool has the bits of tokens that were computed one by one."""
    runner = Runner(engine)
    plain, drafted = (runner.sequence(PROMPTS[3], NUM_OUTPUT) for _ in range(2))
    (want,) = runner.run([plain])
    guess = TREES["late tree"]({id(drafted): [t.token_id for t in want]}, VOCAB_SIZE)
    run_with_drafts(runner, [drafted], guess, prefill_chunk=512)
    assert drafted.token_ids == plain.token_ids and drafted.num_computed == len(plain.token_ids) - 1
    assert [rows.tolist() for rows in stored(engine, drafted)] == [rows.tolist() for rows in stored(engine, plain)]


def stored(engine: NativeEngine, seq: Sequence) -> list[torch.Tensor]:
    """K and V of all that is computed, of each layer."""
    config, size = engine.config, engine.info.block_size
    width, num = min(16, size), seq.num_computed
    found = []
    for cache in engine.decoder.caches:
        keys = torch.from_numpy(cache.k).view(-1, config.num_kv_heads, size // width, config.head_dim, width)
        values = torch.from_numpy(cache.v).view(-1, config.num_kv_heads, size, -(-config.head_dim // 16) * 16)
        rows = [
            keys[seq.block_ids].permute(0, 2, 4, 1, 3).reshape(-1, config.num_kv_heads, config.head_dim),
            values[seq.block_ids].transpose(1, 2).flatten(0, 1),
        ]
        for scale in (cache.k_scale, cache.v_scale):
            if scale is not None:
                own = torch.from_numpy(scale).view(-1, config.num_kv_heads, size)[seq.block_ids]
                rows.append(own.transpose(1, 2).flatten(0, 1))
        found += [r[:num] for r in rows]
    return found


def test_heads_are_told_of_the_rows_that_were_right(engine: NativeEngine) -> None:
    """As if they had been drafted as a chain."""
    told: list[tuple[list[Chunk], torch.Tensor]] = []
    runner = Runner(engine)
    (want,) = runner.run([runner.sequence(PROMPTS[5], 6)])
    answer = [t.token_id for t in want]
    other = [(t + 1) % VOCAB_SIZE for t in answer]
    tree = Draft((other[1], answer[1], other[2], answer[2], other[3]), (ROOT, ROOT, 1, 1, 3))
    right = chain(answer[1:3])
    engine.tap((1, 3), lambda chunks, taps: told.append((list(chunks), taps.clone())))
    try:
        for draft in (tree, right):
            own, beside = runner.sequence(PROMPTS[5], 6), runner.sequence(PROMPTS[6], 6)
            own.token_ids.append(answer[0])
            chunks = [Chunk(beside, 0, 4, False), Chunk(own, 0, len(own.token_ids), True, draft)]
            drawn = engine.step([*chunks, Chunk(beside, 0, 3, False)])
            assert [t.token_id for t in drawn[1]] == answer[1:4]
    finally:
        engine.tap((), lambda chunks, taps: None)
    (tree_chunks, tree_taps), (chain_chunks, chain_taps) = told
    assert [c.draft for c in tree_chunks] == [c.draft for c in chain_chunks] == [chain([]), right, chain([])]
    assert torch.equal(tree_taps, chain_taps)


def test_a_tree_behind_a_prompt_in_one_step(engine: NativeEngine) -> None:
    """Rows of the prompt stand before those of the tree, and drafts may be many."""
    runner = Runner(engine)
    for text in PROMPTS[:4]:
        (want,) = runner.run([runner.sequence(text, 8)])
        answer = [t.token_id for t in want]
        right = [ROOT, 2, 5, 8]  # each behind two that are wrong
        ids_of_tree = [t for a in answer[:4] for t in ((a + 1) % VOCAB_SIZE, (a + 2) % VOCAB_SIZE, a)]
        tree = Draft(tuple(ids_of_tree), tuple(right[i // 3] for i in range(12)))
        seq = runner.sequence(text, 20)
        (drawn,) = engine.step([Chunk(seq, 0, len(text), True, tree)])
        assert drawn == tuple(want[:5])


def masks_of(answer: AnswerState, draft: Draft) -> list[set[int] | None]:
    """Of a sequence whose answer is at its beginning, behind each draft, the root first."""
    seq = make_sequence(4)
    seq.answer = answer
    draws = draws_of([Chunk(seq, 0, 4, True, draft)], [0] * (1 + len(draft)))
    return [None if d.answer is None else set(ids(d.answer.mask_after(d.token_ids[4:]))) for d in draws]


def test_a_grammar_allows_behind_each_draft_what_follows_its_own_path() -> None:
    quote, r, e, o, s, d = map(ord, '"reosd')
    draft = Draft((quote, r, e, o, s, 0, d), (ROOT, 0, 1, 1, 3, 0, 2))
    answer = begin(by_schema({"enum": ["red", "rose"]}))
    assert masks_of(answer, draft) == [{quote}, {r}, {e, o}, {d}, {s}, {e}, None, {quote}]
    assert answer._ids == []


def test_each_draw_has_the_position_and_the_tokens_of_its_path() -> None:
    seq = make_sequence(4, 2)
    draft = Draft((1, 2, 3, 4), (ROOT, ROOT, 1, 2))
    draws = draws_of([Chunk(seq, 5, 1, True, draft)], [0] * 5)
    assert [list(d.token_ids[6:]) for d in draws] == [[], [1], [2], [2, 3], [2, 3, 4]]
    assert [d.position for d in draws] == [2, 3, 3, 4, 5]


def test_logits_that_are_not_finite_count_only_on_the_path_that_is_taken() -> None:
    chunk = Chunk(make_sequence(4), 0, 4, True, Draft((5, 6, 7), (ROOT, ROOT, 1)))
    six, seven, nine = map(SampledToken, (6, 7, 9))
    assert drawn_by_chunk([chunk], [0] * 4, [six, None, seven, nine]) == [(six, seven, nine)]
    with pytest.raises(SequenceError, match="not finite"):
        drawn_by_chunk([chunk], [0] * 4, [six, nine, None, nine])


def test_an_engine_that_knows_no_trees_refuses_them(folder: Path) -> None:
    engine = load_torch(folder, kv_cache_bytes=1 << 20)
    seq = Runner(engine).sequence([1, 2, 3], 6)
    good: Seq[Chunk] = [Chunk(seq, 0, 3, True, chain([4, 5]))]
    assert engine.step(good)
    with pytest.raises(SequenceError, match="beside each other"):
        engine.step([Chunk(seq, 0, 3, True, Draft((4, 5), (ROOT, ROOT)))])


@pytest.mark.parametrize("num_prompt", [1023, 1500])
def test_a_tree_behind_a_context_that_threads_share(tmp_path: Path, num_prompt: int) -> None:
    """Each has some of the keys, of which the last, also over the end of a split, are those of paths."""
    save("llama", tmp_path, num_key_value_heads=1, max_position_embeddings=2048)
    engine = load_native(tmp_path, kv_cache_bytes=8 << 20, block_size=8)
    text = [(7 * n + n // 50) % 300 for n in range(num_prompt)]
    runner = Runner(engine)
    (want,) = runner.run([runner.sequence(text, 16)])
    for threads in (1, 2, 3):
        with engine_threads(engine, threads):
            for kind in TREES:
                seq = runner.sequence(text, 16)
                guess = TREES[kind]({id(seq): [t.token_id for t in want]}, 300)
                (got,), _ = run_with_drafts(runner, [seq], guess, prefill_chunk=512)
                assert got == want, (threads, kind)
                runner.free(seq)
