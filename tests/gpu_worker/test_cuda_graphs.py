"""Decoding steps as graphs, with a recorder that runs again what it was given: buckets, padding, the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk
from services.gpu_worker.cuda_graphs import RECORDED_AFTER, Bucket, bucket_of, emptied, fill_up
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.gpu_inputs import DeviceInputs, build_inputs
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


def test_only_decoding_steps_have_buckets() -> None:
    seq, other = make_sequence(9), make_sequence(9, sid="other", first_block=20)
    for chunks in (
        [Chunk(seq, 0, 9, True)],
        [Chunk(seq, 8, 1, True), Chunk(other, 0, 5, False)],
        [Chunk(seq, 3, 1, False)],
        [Chunk(seq, 8, 1, True, chain([1, 2]))],
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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), RuntimeError("not permitted"), MemoryError()])
def test_what_cannot_be_recorded_is_computed_as_before(folder: Path, error: Exception) -> None:
    text = prompts(1)[0]
    runs = []
    for recorder in (None, Rerun(error)):
        runner = Runner(GpuEngine.load(folder, CPU, recorder=recorder, **ROOM))
        runs.append(ids_of(runner.run([runner.sequence(text, 8)])))
    assert runs[0] == runs[1]
