"""A draft model whose pool is checked in every step: the scripted engine raises where a token is not in its slot."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.scripted_engine import ScriptedEngine
from services.gpu_worker.speculative.acceptance import NUM_LEVELS, level_of
from services.gpu_worker.speculative.draft_model import BOUNDS, STRENGTHS, DraftModel, strength_of
from shared import scripted_vocab as vocab
from tests.gpu_worker.builders import make_params

SIZE = 4
NUM_BLOCKS = 12  # where they are handed out again and again
PROMPT = list(b"abcdefghij")


class Engine(ScriptedEngine):
    """Counts what it computes."""

    def __init__(self, num_blocks: int = 64, max_model_len: int = 64) -> None:
        super().__init__(num_blocks=num_blocks, block_size=SIZE, max_model_len=max_model_len)
        self.steps: list[list[int]] = []

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        self.steps.append([c.count for c in chunks])
        assert all(c.start + c.count <= self.info.max_model_len for c in chunks)
        return super().step(chunks)


def make_sequence(
    prompt: list[int] = PROMPT, num_blocks: int = 8, first_block: int = 0, sid: str = "r.0", **params: object
) -> Sequence:
    return Sequence(
        sid=sid, epoch=1, choice=0, params=make_params(max_tokens=100, **params), num_prompt_tokens=len(prompt),
        token_ids=list(prompt), block_ids=list(range(first_block, first_block + num_blocks)),
    )  # fmt: skip


def right(seq: Sequence, count: int) -> tuple[int, ...]:
    seed = seq.params.seed if seq.params.temperature > 0 else 0
    ids = list(seq.token_ids)
    for _ in range(count):
        ids.append(vocab.next_token(ids, seq.num_prompt_tokens, seed))
    return tuple(ids[len(seq.token_ids) :])


def guess(model: DraftModel, *sequences: Sequence, most: int = 3, num_tokens: int = 512) -> list[tuple[int, ...]]:
    return [p.ids for p in model.propose(sequences, [most] * len(sequences), num_tokens)]


def test_it_guesses_what_it_would_draw_for_all_at_once() -> None:
    engine = Engine()
    model = DraftModel(engine)
    seqs = [make_sequence(), make_sequence(list(b"xyz"), 8, 8, "s.0", temperature=0.5, seed=7)]
    assert guess(model, *seqs) == [right(s, 3) for s in seqs]
    assert engine.steps == [[3, 10], [1, 1], [1, 1]]
    assert [len(s.token_ids) for s in seqs] == [10, 3]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_after_a_step_it_computes_what_is_new_and_no_more(num_right: int) -> None:
    """Guesses that came true are computed, but for the last, which nothing was guessed behind."""
    engine = Engine()
    model, seq = DraftModel(engine), make_sequence()
    ids = guess(model, seq)[0]
    seq.token_ids += [*ids[:num_right], 7]
    del engine.steps[:]
    assert model.num_behind(seq) == num_right + 1
    assert guess(model, seq)[0] == right(seq, 3)
    assert engine.steps == [[2 if num_right == 3 else 1], [1], [1]]


def test_wrong_guesses_are_computed_again_also_where_several_tokens_came_since() -> None:
    model, seq = DraftModel(Engine()), make_sequence()
    guess(model, seq)
    seq.token_ids += [7, 7, 7]  # without another guess
    assert model.num_behind(seq) == 3 and guess(model, seq)[0] == right(seq, 3)


def test_who_lacks_much_catches_up_in_pieces_and_guesses_then() -> None:
    engine = Engine()
    model = DraftModel(engine)
    short, long = make_sequence(), make_sequence(list(range(40)), 12, 8, "s.0")
    assert guess(model, short, long, num_tokens=16) == [right(short, 3), ()]
    assert engine.steps[0] == [10, 8]
    assert guess(model, short, long, num_tokens=16) == [right(short, 3), ()]
    assert guess(model, short, long, num_tokens=16) == [right(short, 3), right(long, 3)]
    assert model.num_behind(long) == 1


def test_it_goes_no_further_than_its_blocks_and_its_context() -> None:
    engine = Engine(max_model_len=14)
    model, seq = DraftModel(engine), make_sequence(num_blocks=3)
    assert guess(model, seq, most=9)[0] == right(seq, 3)  # the third is not computed
    seq.block_ids += [20, 21]
    assert guess(model, seq, most=9)[0] == right(seq, 5)
    seq.token_ids += right(seq, 5)
    assert guess(model, seq, most=9) == [()] and engine.steps[-1] != []


def seal(seq: Sequence) -> None:
    """Blocks that its tokens fill, as the target computes all but the last."""
    while (len(seq.keys) + 1) * SIZE < len(seq.token_ids):
        seq.keys.append(bytes(seq.token_ids[: (len(seq.keys) + 1) * SIZE]))
        seq.num_sealed += 1


def follow(seq: Sequence, sid: str, first_block: int) -> Sequence:
    """Another one that finds the same prompt sealed."""
    other = make_sequence(seq.token_ids[: seq.num_prompt_tokens], 0, sid=sid)
    other.keys = seq.keys[: (len(other.token_ids) - 1) // SIZE]
    other.num_sealed, other.num_computed = len(other.keys), SIZE * len(other.keys)
    other.block_ids = [*seq.block_ids[: other.num_sealed], *range(first_block, first_block + 6)]
    return other


@pytest.mark.parametrize("has_left", [False, True])
def test_what_it_had_computed_of_a_prefix_is_found_and_what_it_had_not_is_computed(has_left: bool) -> None:
    engine = Engine()
    model, seq = DraftModel(engine), make_sequence()
    guess(model, seq)
    seal(seq)
    if has_left:
        model.forget(seq)
    else:
        guess(model, seq)
    hit = follow(seq, "s.0", 20)
    del engine.steps[:]
    assert model.num_behind(hit) == 2 and guess(model, hit)[0] == right(hit, 3)
    assert engine.steps[0] == [2]
    unseen = make_sequence(list(b"unseen prompt"), 8, 30, "t.0")
    seal(unseen)  # the target computed it while nothing was guessed
    other = follow(unseen, "u.0", 40)
    del engine.steps[:]
    assert guess(model, other)[0] == right(other, 3) and engine.steps[0] == [13]


def test_what_was_written_over_is_not_found_though_the_same_tokens_come_back() -> None:
    """By one whose blocks this model has not computed."""
    engine = Engine()
    model, seq = DraftModel(engine), make_sequence()
    guess(model, seq)
    seal(seq)
    model.forget(seq)
    other = make_sequence(list(b"klm"), sid="s.0")
    guess(model, other)
    model.forget(other)
    seal(again := make_sequence(sid="t.0"))
    hit = follow(again, "u.0", 20)
    assert model.num_behind(hit) == 10 and guess(model, hit)[0] == right(hit, 3)


def test_a_block_that_became_an_equal_one_is_computed_where_that_was_not() -> None:
    engine = Engine()
    model, seq, twin = DraftModel(engine), make_sequence(), make_sequence(first_block=20, sid="s.0")
    guess(model, seq)
    seal(seq)
    seal(twin)
    seq.block_ids[1] = twin.block_ids[1]
    del engine.steps[:]
    assert guess(model, seq)[0] == right(seq, 3) and engine.steps[0] == [6]
    guess(model, twin)
    guess(model, twin)  # by now it is known that its blocks are computed
    seq.block_ids[0] = twin.block_ids[0]
    del engine.steps[:]
    assert guess(model, seq)[0] == right(seq, 3) and engine.steps[0] == [1]


def test_a_new_life_of_a_sequence_begins_anew() -> None:
    engine = Engine()
    model, seq = DraftModel(engine), make_sequence()
    guess(model, seq)
    again = make_sequence(first_block=20)
    model.forget(again)  # of which it has nothing
    assert model.num_behind(again) == len(PROMPT) and guess(model, again)[0] == right(again, 3)


def test_a_step_that_fails_leaves_what_was_computed() -> None:
    engine = Engine()
    model, seq = DraftModel(engine), make_sequence([vocab.RAISE, 2, 1, 1])
    with pytest.raises(Exception, match="asked for it"):
        guess(model, seq)
    assert model.num_behind(seq) == 1
    seq.token_ids.append(right(seq, 1)[0])
    assert guess(model, seq, most=1)[0] == right(seq, 1)


def test_a_request_without_grammar_and_with_the_certainty_of_each_token() -> None:
    model, seq = DraftModel(Engine()), make_sequence()
    (proposal,) = model.propose([seq], [3], 512)
    assert proposal.strengths == (strength_of(-0.5),) * 3  # as the scripted engine has it
    assert [level_of(s) for s in STRENGTHS] == list(range(NUM_LEVELS))
    assert strength_of(0.0) == strength_of(1e-6) == STRENGTHS[-1] and strength_of(-50.0) == STRENGTHS[0]
    assert all(a < b for a, b in pairwise(BOUNDS)) and len(BOUNDS) == len(STRENGTHS) - 1


def test_what_rounds_cost_is_learnt() -> None:
    now = iter(range(1000))
    model, seq = DraftModel(Engine(), clock=lambda: float(next(now))), make_sequence()
    guess(model, seq)
    assert model.seconds(1, 3) == pytest.approx(3.0) and model.catch_up_seconds(10) > 0


@dataclass
class Target:
    """Blocks of a pool that are handed out again and again, with hits, as a store and a running set do it."""

    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    sealed: dict[bytes, int] = field(default_factory=dict)  # where nobody holds them any more too
    running: list[Sequence] = field(default_factory=list)
    number: int = 0

    def admit(self, prompt: list[int]) -> None:
        keys, hits = [], []
        for end in range(SIZE, len(prompt), SIZE):
            if (block := self.sealed.get(bytes(prompt[:end]))) is None:
                break
            keys.append(bytes(prompt[:end]))
            hits.append(block)
        blocks = self.take(-(-len(prompt) // SIZE) - len(hits), hits)
        if blocks is None:
            return
        self.number += 1
        seq = make_sequence(prompt, 0, sid=f"r{self.number}.0")
        seq.block_ids, seq.keys, seq.num_sealed = [*hits, *blocks], keys, len(keys)
        self.running.append(seq)

    def take(self, count: int, kept: Seq[int] = ()) -> list[int] | None:
        held = {b for s in self.running for b in s.block_ids} | set(kept)
        free = [b for b in self.free if b not in held][:count]
        if len(free) < count:
            return None
        self.free = [b for b in self.free if b not in free] + free  # the one used last comes last
        self.sealed = {key: b for key, b in self.sealed.items() if b not in free}
        return free

    def draw(self, seq: Sequence, ids: Seq[int]) -> bool:
        """False where there is no block for them."""
        more = -(-(len(seq.token_ids) + len(ids)) // SIZE) - len(seq.block_ids)
        blocks = self.take(max(0, more))
        if blocks is None:
            return False
        seq.block_ids += blocks
        seq.token_ids += ids
        seal(seq)
        for index, key in enumerate(seq.keys):
            twin = self.sealed.setdefault(key, seq.block_ids[index])
            seq.block_ids[index] = twin  # as Remap does it
        return True


ACTIONS = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 2), st.integers(6, 14)),
    st.tuples(st.just("guess"), st.integers(1, 4), st.integers(0, 12)),
    st.tuples(st.just("draw"), st.integers(0, 1), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 2), st.just(0)),
)


@settings(max_examples=200)
@given(st.lists(ACTIONS, min_size=10, max_size=40))
def test_whatever_happens_to_sequences_and_blocks_guesses_are_those_of_the_right_tokens(
    actions: list[tuple[str, int, int]],
) -> None:
    model, target = DraftModel(Engine(NUM_BLOCKS)), Target()
    texts = [list(b"aaaabbbbccccdd"), list(b"aaaabbbbxxxxyy"), list(b"zzzzbbbbccccdd")]
    guesses: dict[str, tuple[int, ...]] = {}
    for action, which, number in actions:
        running = target.running
        if action == "admit":
            target.admit(texts[which][:number])
        elif action == "guess" and running:
            got = model.propose(running, [which] * len(running), number)
            for seq, proposal in zip(running, got, strict=True):
                assert proposal.ids == right(seq, len(proposal.ids))
                guesses[seq.sid] = proposal.ids
        elif action == "draw" and which < len(running):
            seq = running[which]
            ids = [*guesses.get(seq.sid, ())[:number], 100 + number]  # some came true, and then another token
            if not target.draw(seq, ids):
                running.remove(seq)
                model.forget(seq)
            guesses.pop(seq.sid, None)
        elif action == "leave" and which < len(running):
            model.forget(running.pop(which))
    assert set(model._shadows) <= {s.sid for s in target.running}
