"""A step's tensors for a GPU: rows, slots and batches of attention, and their way to the device."""

from __future__ import annotations

import torch

from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk
from services.gpu_worker.gpu_inputs import ALIGNMENT, DeviceInputs, build_inputs, num_bytes, upload
from tests.gpu_worker.builders import make_sequence

GEOMETRY = Geometry(
    num_blocks=64, block_size=4, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=300, max_model_len=64
)
CPU = torch.device("cpu")


def three_chunks() -> tuple[DeviceInputs, tuple[int, ...]]:
    """A prompt's middle, a decoding row, a prompt's end."""
    first = make_sequence(12, sid="a.0", first_block=0)
    second = make_sequence(6, 3, sid="bb.0", first_block=20)
    third = make_sequence(7, sid="ccc.0", first_block=40)
    chunks = [Chunk(first, 2, 5, False), Chunk(second, 8, 1, True), Chunk(third, 3, 4, True)]
    return build_inputs(chunks, GEOMETRY)


def test_single_rows_come_first_and_have_a_batch_of_their_own() -> None:
    inputs, sample_chunks = three_chunks()
    assert inputs.positions.tolist() == [8, 2, 3, 4, 5, 6, 3, 4, 5, 6]
    assert inputs.slots.tolist() == [22 * 4, 2, 3, 4, 5, 6, 163, 164, 165, 166]
    assert (inputs.sample_rows.tolist(), sample_chunks) == ([0, 9], (1, 2))
    one, more = inputs.batches
    assert (one.first_row, one.num_rows, one.seq_lens.tolist()) == (0, 1, [9])
    assert (more.first_row, more.num_rows, more.seq_lens.tolist()) == (1, 9, [7, 7])
    assert one.block_tables.tolist() == [[20, 21, 22]] and more.block_tables.tolist() == [[0, 1], [40, 41]]
    assert more.row_starts.tolist() == [1, 6, 10]


def test_a_token_that_the_step_before_draws_is_a_place_in_its_samples() -> None:
    seq = make_sequence(6, 2)
    inputs, _ = build_inputs([Chunk(seq, 8, 1, True)], GEOMETRY, {id(seq): 3})
    assert inputs.token_ids.tolist() == [-4]
    known, _ = build_inputs([Chunk(seq, 7, 1, True)], GEOMETRY, {id(seq): 3})
    assert known.token_ids.tolist() == seq.token_ids[7:]


def test_what_arrives_is_what_was_sent_and_aligned() -> None:
    inputs, _ = three_chunks()
    sent = inputs.tensors()
    there = upload(sent, CPU)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(sent, there, strict=True))
    assert all(t.data_ptr() % ALIGNMENT == 0 for t in there)
    arrived = inputs.with_tensors(there)
    assert arrived.batches[1].longest == inputs.batches[1].longest
    assert all(a is b for a, b in zip(arrived.tensors(), there, strict=True))


def test_what_is_sent_into_a_buffer_lies_there() -> None:
    inputs, _ = three_chunks()
    buffer = torch.zeros(num_bytes(inputs.tensors()) + 100, dtype=torch.uint8)
    views = upload(inputs.tensors(), CPU, into=buffer)
    assert views[0].data_ptr() == buffer.data_ptr() and torch.equal(views[1], inputs.positions)
    assert not buffer[-100:].any()
