"""Block tables that are remembered are those that would be made anew, whatever happens to the lists between steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.block_tables import BlockTables
from services.gpu_worker.step_inputs import SequenceError
from tests.gpu_worker.builders import make_sequence

POOL = 50
IDS = st.lists(st.integers(0, POOL - 1), min_size=1, max_size=12)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), IDS, st.booleans()), min_size=1, max_size=3), max_size=6))
def test_a_table_is_what_the_lists_say_now(steps: list[list[tuple[int, list[int], bool]]]) -> None:
    """Between steps a list grows or becomes another, and sequences come and go."""
    tables, sequences = BlockTables(), [make_sequence(4, sid=f"s{i}.0") for i in range(3)]
    for step in steps:
        for number, ids, grows in step:
            sequences[number].block_ids[len(sequences[number].block_ids) if grows else 0 :] = ids
        taken = [sequences[number] for number in dict.fromkeys(number for number, _, _ in step)]
        nums = [len(seq.block_ids) for seq in taken]
        got = tables.table(taken, nums, POOL)
        tables.keep(taken)
        assert got.dtype == np.int32
        for line, seq, num in zip(got.tolist(), taken, nums, strict=True):
            assert line == seq.block_ids + [0] * (max(nums) - num)


def test_no_more_is_in_a_table_than_is_asked_for() -> None:
    tables, seq = BlockTables(), make_sequence(4)
    seq.block_ids[:] = [7, 8, 9]
    assert tables.table([seq], [2], POOL).tolist() == [[7, 8]]


def test_a_block_outside_the_pool_is_refused_each_time_until_it_is_gone() -> None:
    tables, seq = BlockTables(), make_sequence(4)
    seq.block_ids[:] = [7]
    tables.table([seq], [1], POOL)
    for wrong in (POOL, -1):
        seq.block_ids[:] = [7, wrong]
        for _ in range(2):
            with pytest.raises(SequenceError, match="a block id is outside the pool of 50"):
                tables.table([seq], [2], POOL)
    seq.block_ids[1] = 3
    assert tables.table([seq], [2], POOL).tolist() == [[7, 3]]
