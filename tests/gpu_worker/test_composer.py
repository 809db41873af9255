from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.composer import MAX_SCORES, Budget, compose
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


def scoring(sid: str, num_tokens: int = 200, **fields: int) -> Sequence:
    seq = make_sequence(num_tokens, sid=sid, num_blocks=60, prompt_logprobs=1, max_tokens=fields.pop("max_tokens", 8))
    seq.num_computed, seq.score_from = fields.get("num_computed", 0), fields.get("score_from", 0)
    return seq


def test_of_prompts_whose_log_probabilities_are_asked_for_a_step_has_few_tokens() -> None:
    budget = {"max_num_batched_tokens": 1000, "prefill_chunk": 1000}
    long_one = prefilling("c", num_tokens=30)
    assert brief(plan([scoring("a"), scoring("b"), long_one], **budget)) == [
        ("a", 0, MAX_SCORES, False),
        ("c", 0, 30, True),
    ]
    assert brief(plan([scoring("a", 40), scoring("b")], **budget)) == [("a", 0, 40, True), ("b", 0, 25, False)]
    # the last token's logits are not the prompt's
    assert brief(plan([scoring("a", MAX_SCORES + 1)], **budget)) == [("a", 0, MAX_SCORES + 1, True)]
    assert brief(plan([scoring("a", MAX_SCORES + 2)], **budget)) == [("a", 0, MAX_SCORES, False)]


def test_what_the_log_has_of_a_prompt_takes_no_row_of_logits() -> None:
    budget = {"max_num_batched_tokens": 1000, "prefill_chunk": 1000}
    [chunk] = plan([scoring("a", score_from=100)], **budget)
    assert (chunk.count, chunk.scored) == (100 + MAX_SCORES, range(100, 100 + MAX_SCORES))
    [chunk] = plan([scoring("a", score_from=199)], **budget)
    assert (chunk.count, chunk.sample, list(chunk.scored)) == (200, True, [])


def test_where_nothing_is_drawn_the_last_token_is_not_computed() -> None:
    [chunk] = plan([scoring("a", 30, max_tokens=0)])
    assert (chunk.count, chunk.sample, chunk.logit_rows) == (29, False, range(29))
    [chunk] = plan([scoring("a", 30, max_tokens=0, num_computed=28)])
    assert brief([chunk]) == [("a", 28, 1, False)]


@given(st.integers(2, 300), st.integers(0, 300), st.integers(1, 120), st.sampled_from([0, 4]))
def test_every_token_of_a_prompt_is_scored_once_and_in_order(
    num_tokens: int, score_from: int, num_batched_tokens: int, max_tokens: int
) -> None:
    seq = scoring("a", num_tokens, score_from=min(score_from, num_tokens - 1), max_tokens=max_tokens)
    seq.block_ids = list(range(100))
    scored: list[int] = []
    while seq.is_scoring:
        [chunk] = plan([seq], max_num_batched_tokens=num_batched_tokens, prefill_chunk=num_batched_tokens)
        assert len(chunk.scored) <= MAX_SCORES and len(chunk.logit_rows) == len(chunk.scored) + chunk.sample
        scored += chunk.scored
        seq.num_computed += chunk.count
    assert scored == list(range(seq.score_from, num_tokens - 1))
