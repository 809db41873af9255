"""Decoding steps as graphs, with a recorder that runs again what it was given: buckets, padding, the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk
from services.gpu_worker.cuda_graphs import RECORDED_AFTER, Bucket, bucket_of, emptied, fill_up, places_in, spread
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.gpu_inputs import DeviceInputs, build_inputs, order_of
from services.gpu_worker.speculative.draft import chain
from tests.gpu_worker.builders import make_sequence
from tests.gpu_worker.engine_loops import run_loop
from tests.gpu_worker.tiny_models import Runner, ids_of, prompts, save

CPU = torch.device("cpu")
ROOM = {"kv_cache_bytes": 4 << 20}
GEOMETRY = Geometry(
    num_blocks=2048, block_size=4, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=300, max_model_len=6000
)


class Rerun:
    """Runs what it was given anew at every replay, into the same place."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_recorded = 0
        self.num_replays = 0
        self._error = error

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        if self._error is not None:
            raise self._error
        self.num_recorded += 1
        out = run()

        def replay() -> None:
            self.num_replays += 1
            out.copy_(run())

        return replay, out


def decoding(*lengths: int) -> DeviceInputs:
    chunks = [
        Chunk(make_sequence(n, num_blocks=-(-n // 4), first_block=i), n - 1, 1, True) for i, n in enumerate(lengths)
    ]
    return build_inputs(chunks, GEOMETRY)[0]


@pytest.mark.parametrize(
    ("lengths", "most", "bucket"),
    [
        ([5], 64, Bucket(1, 1024)),
        ([5, 9, 7], 64, Bucket(4, 1024)),
        ([1024] * 9, 64, Bucket(16, 1024)),
        ([5, 1025], 64, Bucket(2, 4096)),
        ([5, 4097], 64, Bucket(2, 6000)),
        ([5] * 9, 10, Bucket(10, 1024)),
        ([5] * 9, 8, None),
    ],
)
def test_a_step_goes_to_the_smallest_bucket_that_it_fits_in(
    lengths: list[int], most: int, bucket: Bucket | None
) -> None:
    assert bucket_of(decoding(*lengths), most, 6000) == bucket


def drafting(*nums: int, length: int = 9) -> tuple[list[Chunk], DeviceInputs]:
    """The last token of sequences with so many drafts each, in a prompt's last blocks."""
    chunks = [
        Chunk(make_sequence(length, sid=str(i), num_blocks=8, first_block=20 * i), length - 1, 1, True, chain([7] * n))
        for i, n in enumerate(nums)
    ]
    return chunks, build_inputs(chunks, GEOMETRY)[0]


@pytest.mark.parametrize(
    ("nums", "most", "bucket"),
    [
        ([3], 64, Bucket(1, 1024, 4)),
        ([1, 0, 4], 64, Bucket(4, 1024, 6)),
        ([15] * 4, 64, Bucket(4, 1024, 16)),
        ([16], 64, None),
        ([7] * 5, 63, None),
        ([7] * 4, 32, Bucket(4, 1024, 8)),
    ],
)
def test_steps_with_drafts_have_as_many_rows_of_each(nums: list[int], most: int, bucket: Bucket | None) -> None:
    assert bucket_of(drafting(*nums)[1], most, 6000) == bucket


def test_rows_of_drafts_keep_their_places_and_others_see_nothing() -> None:
    chunks, inputs = drafting(2, 0, 1)
    bucket = Bucket(4, 1024, 4)
    places = places_in(inputs, bucket)
    whole = spread(inputs, places, bucket, 4, 3, False)
    (batch,) = whole.batches
    order = [chunks[i] for i in order_of(chunks)]
    assert places.tolist() == [0, 4, 5, 6, 8, 9], "those of one row are first"
    assert whole.token_ids[places].tolist() == inputs.token_ids.tolist()
    own = inputs.slots.tolist()
    assert whole.slots.tolist() == [own[0], -1, -1, -1, *own[1:4], -1, *own[4:], -1, -1, -1, -1, -1, -1]
    assert batch.ends.tolist() == [9, 0, 0, 0, 9, 10, 11, 0, 9, 10, 0, 0, 0, 0, 0, 0]
    assert batch.positions.tolist() == [8, 8, 8, 8, 8, 9, 10, 10, 8, 9, 9, 9, 0, 0, 0, 0]
    assert batch.seq_lens.tolist() == [9, 11, 10, 1] and batch.row_starts.tolist() == [0, 4, 8, 12, 16]
    for n, c in enumerate(order):
        assert batch.block_tables[n, :3].tolist() == c.seq.block_ids[:3]
    nobody = emptied(whole)
    assert [t.shape for t in nobody.tensors()] == [t.shape for t in whole.tensors()]


def test_only_decoding_steps_have_buckets() -> None:
    seq, other = make_sequence(9), make_sequence(9, sid="other", first_block=20)
    for chunks in (
        [Chunk(seq, 0, 9, True)],
        [Chunk(seq, 8, 1, True), Chunk(other, 0, 5, False)],
        [Chunk(seq, 3, 1, False)],
        [Chunk(seq, 7, 2, True, chain([1, 2]))],
    ):
        assert bucket_of(build_inputs(chunks, GEOMETRY)[0], 64, 6000) is None


def test_rows_that_fill_a_bucket_up_read_and_store_nothing() -> None:
    inputs = decoding(5, 9, 7)
    whole = fill_up(inputs, Bucket(4, 1024), 4)
    (batch,) = whole.batches
    assert whole.slots.tolist() == [*inputs.slots.tolist(), -1]
    assert (batch.num_rows, batch.longest, batch.ends.tolist()) == (4, 1024, [5, 9, 7, 0])
    assert batch.block_tables.shape == (4, 256) and batch.row_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.block_tables[1, :3].tolist() == inputs.batches[0].block_tables[1].tolist()
    assert batch.tile_seqs.tolist() == whole.sample_rows.tolist() == [0, 1, 2, 3]
    nobody = emptied(whole)
    assert [t.shape for t in nobody.tensors()] == [t.shape for t in whole.tensors()]
    assert set(nobody.slots.tolist()) == {-1} and not nobody.batches[0].ends.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save("llama", path)
    return path


CONTROLS: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 1}]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_steps_without_graphs(folder: Path, overlap: bool) -> None:
    texts = prompts(4, seed=6)
    runner = Runner(GpuEngine.load(folder, CPU, **ROOM))
    want = [
        ids_of(runner.run([runner.sequence(text, 16, **own)]))[0] for text, own in zip(texts, CONTROLS, strict=True)
    ]
    rerun = Rerun()
    engine = GpuEngine.load(folder, CPU, recorder=rerun, **ROOM)
    assert run_loop(engine, texts, CONTROLS, 16, overlap=overlap) == want
    assert rerun.num_recorded == 1 and rerun.num_replays > 4


@pytest.mark.parametrize("own", CONTROLS)
def test_drafts_are_verified_by_graphs_as_without(folder: Path, own: dict[str, Any]) -> None:
    """Right ones, wrong ones and none side by side, with what layers read of each row."""
    text, told, drawn = prompts(1, seed=8)[0], [], []
    rerun = Rerun()
    for recorder in (None, rerun):
        engine = GpuEngine.load(folder, CPU, recorder=recorder, **ROOM)
        kept: list[torch.Tensor] = []
        engine.tap((1, 4), lambda chunks, taps, kept=kept: kept.append(taps))
        runner = Runner(engine)
        want = ids_of(runner.run([runner.sequence(text, 6, **own)]))[0]
        sequences = [runner.sequence(text, 6, **own) for _ in range(3)]
        kept.clear()
        runner.step([Chunk(s, 0, len(text), True) for s in sequences])
        drafts = [chain([want[1], want[2], (want[3] + 1) % 300]), chain([]), chain([want[1]])]
        for _ in range(RECORDED_AFTER + 2):
            chunks = [Chunk(s, len(text), 1, True, d) for s, d in zip(sequences, drafts, strict=True)]
            drawn.append(ids_of(engine.step(chunks)))
        told.append(kept)
    assert drawn == [[want[1:4], want[1:2], want[1:3]]] * (2 * RECORDED_AFTER + 4)
    assert (rerun.num_recorded, rerun.num_replays) == (2, 4), "two are of steps without drafts"
    for rows, others in zip(*told, strict=True):
        torch.testing.assert_close(rows, others, rtol=1e-4, atol=1e-4)


def test_what_layers_read_is_kept_with_a_graph_as_without(folder: Path) -> None:
    """Of the rows that there are, and for good: the next step writes anew. Not of a step that nobody wants it of."""
    layers, told = (0, 2, 4), []
    for recorder in (None, Rerun()):
        engine = GpuEngine.load(folder, CPU, recorder=recorder, **ROOM)
        kept: list[tuple[list[str], torch.Tensor]] = []
        wanted = iter([True] * 9 + [False] + [True] * 20)
        engine.tap(layers, lambda chunks, taps, kept=kept: kept.append(([c.seq.sid for c in chunks], taps)),
                   lambda chunks, wanted=wanted: next(wanted))  # fmt: skip
        runner = Runner(engine)
        runner.run([runner.sequence(text, 14) for text in prompts(3, seed=6)])
        told.append(kept)
    assert isinstance(recorder, Rerun) and recorder.num_replays > 4
    assert len(told[0]) == len(told[1]) == 13
    for (sids, rows), (other_sids, other_rows) in zip(*told, strict=True):
        assert sids == other_sids and rows.shape == other_rows.shape and rows.shape[1:] == (3, 48)
        torch.testing.assert_close(rows, other_rows, rtol=1e-4, atol=1e-4)


def test_a_graph_is_recorded_once_its_bucket_has_been_met_often(folder: Path) -> None:
    rerun = Rerun()
    runner = Runner(GpuEngine.load(folder, CPU, recorder=rerun, **ROOM))
    seq = runner.sequence([1, 2, 3], 12)
    runner.step([Chunk(seq, 0, 3, True)])
    counts = []
    for _ in range(RECORDED_AFTER + 2):
        runner.step([Chunk(seq, len(seq.token_ids) - 1, 1, True)])
        counts.append((rerun.num_recorded, rerun.num_replays))
    assert counts == [(0, 0)] * (RECORDED_AFTER - 1) + [(1, 0), (1, 1), (1, 2)]


def test_graphs_write_their_logits_to_one_place(folder: Path) -> None:
    """Some hundred buckets may be met, the largest of which give out some hundred megabytes each."""
    engine = GpuEngine.load(folder, CPU, recorder=Rerun(), **ROOM)
    runner = Runner(engine)
    for num in (1, 2):
        sequences = [runner.sequence([1, 2, 3], 12) for _ in range(num)]
        runner.step([Chunk(s, 0, 3, True) for s in sequences])
        for _ in range(RECORDED_AFTER):
            runner.step([Chunk(s, len(s.token_ids) - 1, 1, True) for s in sequences])
    assert engine._graphs is not None
    graphs = engine._graphs._graphs
    assert set(graphs) == {Bucket(n, min(1024, engine.info.max_model_len)) for n in (1, 2)}
    assert len({graph.logits.data_ptr() for graph in graphs.values()}) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), RuntimeError("not permitted"), MemoryError()])
def test_what_cannot_be_recorded_is_computed_as_before(folder: Path, error: Exception) -> None:
    text = prompts(1)[0]
    runs = []
    for recorder in (None, Rerun(error)):
        runner = Runner(GpuEngine.load(folder, CPU, recorder=recorder, **ROOM))
        runs.append(ids_of(runner.run([runner.sequence(text, 8)])))
    assert runs[0] == runs[1]
