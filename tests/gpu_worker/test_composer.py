from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.composer import Budget, compose
from tests.gpu_worker.builders import BLOCK_SIZE, make_sequence


def plan(ready: list[Sequence], max_prefill_tokens: int = 1000, turn: int = 0, **budget: int) -> list[Chunk]:
    bounds = Budget(**({"max_num_batched_tokens": 100, "max_num_seqs": 100, "prefill_chunk": 100} | budget))
    return compose(ready, bounds, block_size=BLOCK_SIZE, max_prefill_tokens=max_prefill_tokens, turn=turn)


def brief(chunks: list[Chunk]) -> list[tuple[str, int, int, bool]]:
    return [(c.seq.sid, c.start, c.count, c.sample) for c in chunks]


def prefilling(sid: str, num_tokens: int = 20, num_computed: int = 0, alone: bool = False) -> Sequence:
    return make_sequence(num_tokens, sid=sid, num_computed=num_computed, alone=alone)


def decoding(sid: str, alone: bool = False) -> Sequence:
    return make_sequence(6, 2, sid=sid, num_computed=7, alone=alone)


def test_decoding_comes_first_then_prefill_in_order() -> None:
    chunks = plan([prefilling("a"), decoding("b"), prefilling("c"), decoding("d")])
    assert brief(chunks) == [("b", 7, 1, True), ("d", 7, 1, True), ("a", 0, 20, True), ("c", 0, 20, True)]


def test_the_token_budget_cuts_prefill_and_only_the_last_chunk_samples() -> None:
    assert brief(plan([decoding("a"), prefilling("b")], max_num_batched_tokens=8)) == [
        ("a", 7, 1, True),
        ("b", 0, 7, False),
    ]
    assert brief(plan([prefilling("b", num_computed=7)], max_num_batched_tokens=13)) == [("b", 7, 13, True)]


def test_prefill_beside_decoding_is_bounded_by_time() -> None:
    assert brief(plan([decoding("a"), prefilling("b")], max_prefill_tokens=5))[1] == ("b", 0, 5, False)
    assert brief(plan([prefilling("b")], max_prefill_tokens=5)) == [("b", 0, 20, True)]


def test_a_prefill_chunk_leaves_room_for_the_next_prompt() -> None:
    chunks = plan([prefilling("a"), prefilling("b")], max_num_batched_tokens=16, prefill_chunk=10)
    assert brief(chunks) == [("a", 0, 10, False), ("b", 0, 6, False)]


def test_a_step_has_at_most_max_num_seqs_sequences() -> None:
    chunks = plan([decoding("a"), decoding("b"), prefilling("c"), prefilling("d")], max_num_seqs=3)
    assert [c.seq.sid for c in chunks] == ["a", "b", "c"]
    assert len(plan([decoding(s) for s in "abcd"], max_num_seqs=3)) == 3


def test_prefill_stops_where_its_blocks_end() -> None:
    seq = make_sequence(20, num_blocks=3)
    assert brief(plan([seq])) == [("r.0", 0, 12, False)]


def test_a_resumed_sequence_computes_its_output_again_and_draws_after_the_last_token() -> None:
    assert brief(plan([make_sequence(6, 5)])) == [("r.0", 0, 11, True)]


def test_who_runs_alone_takes_turns_with_the_others() -> None:
    ready = [decoding("a"), decoding("x", alone=True), prefilling("b"), prefilling("y", alone=True)]
    steps = [[c.seq.sid for c in plan(ready, turn=turn)] for turn in range(4)]
    assert steps == [["a", "b"], ["x"], ["y"], ["a", "b"]]
    assert [c.seq.sid for c in plan([decoding("x", alone=True)], turn=5)] == ["x"]


sequences = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 8), st.integers(0, 29), st.booleans()), min_size=1, max_size=8
)
budgets = st.builds(Budget, st.integers(1, 40), st.integers(1, 8), st.integers(1, 40))


@given(sequences, budgets, st.integers(1, 40), st.integers(0, 100))
def test_every_step_keeps_the_bounds_and_goes_on(
    drawn: list[tuple[int, int, int, bool]], budget: Budget, max_prefill_tokens: int, turn: int
) -> None:
    ready = [
        make_sequence(p, o, sid=f"r{i}.0", num_computed=min(c, p + o - 1), num_blocks=10, alone=alone)
        for i, (p, o, c, alone) in enumerate(drawn)
    ]
    chunks = compose(ready, budget, block_size=BLOCK_SIZE, max_prefill_tokens=max_prefill_tokens, turn=turn)
    assert chunks
    assert 0 < len(chunks) <= budget.max_num_seqs
    assert sum(c.count for c in chunks) <= budget.max_num_batched_tokens
    assert len({c.seq.sid for c in chunks}) == len(chunks)
    assert len(chunks) == 1 or not any(c.seq.alone for c in chunks)
    for c in chunks:
        assert c.start == c.seq.num_computed and 0 < c.count <= max(1, budget.prefill_chunk)
        assert c.start + c.count <= min(len(c.seq.token_ids), len(c.seq.block_ids) * BLOCK_SIZE)
        assert c.sample == (c.start + c.count == len(c.seq.token_ids))
