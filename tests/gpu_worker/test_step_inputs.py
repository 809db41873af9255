"""Step inputs: which rows, positions and cache rows chunks become, and which chunks are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.paged_attention import TILE
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.step_inputs import SequenceError, build_step_inputs
from shared.protocol import SamplingParams

GEOMETRY = Geometry(
    num_blocks=40, block_size=16, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=100, max_model_len=128
)


def sequence(num_tokens: int, block_ids: list[int], sid: str = "s.0") -> Sequence:
    return Sequence(
        sid=sid, epoch=1, choice=0, params=SamplingParams(max_tokens=1, seed=0), num_prompt_tokens=1,
        token_ids=[(7 * i) % 100 for i in range(num_tokens)], block_ids=block_ids,
    )  # fmt: skip


def test_rows_of_a_mixed_step() -> None:
    prompt, decoding = sequence(40, [3, 1, 2], "a.0"), sequence(18, [9, 5], "b.0")
    inputs = build_step_inputs([Chunk(prompt, 16, 20, False), Chunk(decoding, 17, 1, True)], GEOMETRY)
    assert inputs.num_rows == 21
    assert inputs.token_ids[:21].tolist() == [decoding.token_ids[17], *prompt.token_ids[16:36]]
    assert inputs.positions[:21].tolist() == [17, *range(16, 36)]
    assert inputs.positions[21:].tolist() == inputs.token_ids[21:].tolist() == [0] * 3
    assert inputs.sample_rows.tolist() == [0]
    assert inputs.sample_chunks == (1,)
    assert inputs.started_blocks.tolist() == [1, 2]
    rows = inputs.kv_rows.view(21, 2)
    assert rows[0].tolist() == [(5 * 2 + 0) * 16 + 1, (5 * 2 + 1) * 16 + 1]
    assert rows[1].tolist() == [(1 * 2 + 0) * 16 + 0, (1 * 2 + 1) * 16 + 0]
    assert rows[20].tolist() == [(2 * 2 + 0) * 16 + 3, (2 * 2 + 1) * 16 + 3]
    assert len(inputs.plans) == 2


@given(
    sizes=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 38), st.booleans()), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_every_row_is_planned_once(sizes: list[tuple[int, int, bool]], seed: int) -> None:
    """Each row and head has one place in the plans' results, and meets exactly the keys up to its position."""
    free = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()
    chunks = []
    for start, count, sample in sizes:
        num_blocks = -(-(start + count) // 16)
        chunks.append(Chunk(sequence(start + count, [free[i % 40] for i in range(num_blocks)]), start, count, sample))
    inputs = build_step_inputs(chunks, GEOMETRY)
    assert sum(p.out_index.numel() for p in inputs.plans) == 4 * inputs.num_rows == 4 * sum(c.count for c in chunks)
    row = 0
    for plan in inputs.plans:
        seen = (plan.mask == 0).sum(-1)[:, 0]  # keys seen by item and padded row
        by_group = torch.zeros(plan.num_groups, plan.num_rows_padded, dtype=torch.int64)
        by_group.index_add_(0, plan.item_group, seen)
        queries = torch.zeros(plan.num_groups, 2 * plan.num_rows_padded, dtype=torch.int64)
        queries[plan.item_group] = plan.q_index.view(len(plan.item_group), -1)
        for place in plan.out_index.tolist():
            group, head_and_row = divmod(place, 2 * plan.num_rows_padded)
            assert by_group[group, head_and_row % plan.num_rows_padded] == inputs.positions[row // 4] + 1
            assert queries[group, head_and_row] == row
            row += 1
        assert plan.mask.shape[-1] == TILE
    assert row == 4 * inputs.num_rows


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (Chunk(sequence(5, [0]), 0, 6, True), "tokens 0 to 6 of 5"),
        (Chunk(sequence(5, [0]), 3, 0, True), "tokens 3 to 3"),
        (Chunk(sequence(5, [0]), -1, 2, True), "tokens -1"),
        (Chunk(sequence(200, list(range(20))), 0, 129, False), "context of 128"),
        (Chunk(sequence(17, [0]), 16, 1, True), "do not fit in 1 blocks"),
        (Chunk(sequence(5, [40]), 0, 5, True), "outside the pool"),
        (Chunk(sequence(5, [-1]), 0, 5, True), "outside the pool"),
        (Chunk(dataclasses.replace(sequence(2, [0]), token_ids=[0, 100]), 0, 2, True), "outside the vocabulary"),
        (Chunk(dataclasses.replace(sequence(2, [0]), token_ids=[-1, 1]), 0, 2, True), "outside the vocabulary"),
    ],
)
def test_impossible_chunks_name_their_sequence(chunk: Chunk, reason: str) -> None:
    good = Chunk(sequence(3, [1], "good.0"), 0, 3, True)
    with pytest.raises(SequenceError, match=reason) as caught:
        build_step_inputs([good, chunk], GEOMETRY)
    assert caught.value.sid == "s.0"


def test_tokens_before_the_chunk_are_not_its_business() -> None:
    old = dataclasses.replace(sequence(3, [0]), token_ids=[999, 1, 2])
    assert build_step_inputs([Chunk(old, 1, 2, True)], GEOMETRY).num_rows == 2
