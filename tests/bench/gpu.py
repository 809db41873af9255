"""Everything there is to show on a GPU, in one command: `python -m tests.bench.gpu FOLDER`.

Ceilings of the card, measured here; each op's error against float64 and its time as a part of what the ceilings allow,
and others' times for the same; decoding and prefill of a model of random weights, in bfloat16, FP8 and 4 bits; that a
sequence's tokens are the same alone as among others; what verifying drafts costs; that tokens are those without,
whoever guesses; the default model with speculation and without, and with the services around it. Results go to
FOLDER/gpu.json and gpu.md, a table is printed last. What has not begun when `--minutes` are over is left out, and said
to be. `--tiny` runs all of it at sizes that say nothing, also where there is no GPU, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.kv_cache import empty_kv_cache
from kernels.matmul import DeviceWeight, prepare
from kernels.matmul_float import FloatWeight
from kernels.matmul_w8a8 import ScaledWeight
from kernels.planar_weight import GroupedCodes
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk, EngineInfo, Sequence
from services.gpu_worker.cuda_graphs import CudaRecorder, DecodeGraphs
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.model.config import LayerKind, ModelConfig
from services.gpu_worker.model.gpu_decoder import GpuDecoder
from services.gpu_worker.model.layers import DecoderWeights, FeedForwardWeights, LayerWeights, Norm
from services.gpu_worker.weights.on_device import DeviceLinear, DeviceTable
from shared import model_source
from shared.model_source import default_cache_dir
from shared.protocol import SamplingParams
from shared.settings import CommonSettings
from tests.bench import gpu_others, gpu_serving, gpu_speculation
from tests.bench.gpu_cases import CARD, TINY, Sizes, cases
from tests.gpu_worker.tiny_models import save

Row = dict[str, Any]
BLOCK_SIZE = 16
COLUMNS = ("ms", "of floor", "of one", "goal", "tok/s", "error", "GB/s", "TFLOP/s")


class Bench:
    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.bytes_s, self.flops_s = 1.0, 1.0

    def seconds(self, run: Callable[[], object], times: int = 20) -> float:
        """The median, on the device, each after a write that its caches do not outlast."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        run()
        flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        found = []
        for _ in range(times):
            flush.zero_()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            run()
            events[1].record()
            events[1].synchronize()
            found.append(events[0].elapsed_time(events[1]) / 1e3)
        return statistics.median(found)

    def ceilings(self) -> Row:
        size, side = (1 << 30, 8192) if self.device.type == "cuda" else (1 << 16, 64)
        source, target = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        self.bytes_s = 2 * size / self.seconds(lambda: target.copy_(source))
        a = torch.ones(side, side, dtype=self.dtype, device=self.device)
        self.flops_s = 2 * side**3 / self.seconds(lambda: a @ a)
        return {"what": "ceilings", "GB/s": self.bytes_s / 1e9, "TFLOP/s": self.flops_s / 1e12}

    def ops(self) -> Iterator[Row]:
        for case in cases(self.sizes, self.device, self.dtype):
            got, want = case.run().double(), case.want().to(self.device).double()
            error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
            taken = self.seconds(case.run)
            floor = max(case.num_bytes / self.bytes_s, case.num_flops / self.flops_s)
            yield {"what": case.name, "ms": taken * 1e3, "of floor": floor / taken, "error": error,
                   "failed": not error <= case.error} | ({"goal": case.goal} if case.goal else {})  # fmt: skip

    def others(self) -> Iterator[Row]:
        runs = (gpu_others.products, gpu_others.attention)
        for name, run in (pair for make in runs for pair in make(self.sizes, self.device, self.dtype)):
            yield {"what": name, "ms": self.seconds(run) * 1e3}

    # --- a model -----------------------------------------------------------------------------------------------------

    def engine(self, bits: int, num_blocks: int) -> tuple[GpuEngine, int]:
        """Of random weights, and their bytes."""
        s = self.sizes
        config = ModelConfig(
            s.vocabulary, s.hidden, s.inner, s.layers, s.heads, s.kv_heads, s.dim, 1e-5, 1 << 16,
            (LayerKind(),) * s.layers,
        )  # fmt: skip
        made: list[DeviceWeight] = []

        def linear(rows: int, columns: int, to: torch.dtype | None = None) -> DeviceLinear:
            made.append(self._weight(rows, columns, 16 if to else bits))
            return DeviceLinear((made[-1],), to=to)

        def norm() -> Norm:
            return Norm(torch.ones(s.hidden, device=self.device), None, 1e-5)

        layers = tuple(
            LayerWeights(
                norm(), linear((s.heads + 2 * s.kv_heads) * s.dim, s.hidden), None, None,
                linear(s.hidden, s.heads * s.dim), None, norm(),
                FeedForwardWeights(linear(2 * s.inner, s.hidden), linear(s.hidden, s.inner)), None,
            )
            for _ in range(s.layers)
        )  # fmt: skip
        table = torch.randn(s.vocabulary, s.hidden, dtype=self.dtype, device=self.device)
        embedding = DeviceTable(FloatWeight(table), self.dtype)
        head = linear(s.vocabulary, s.hidden, torch.float32)
        length = s.context + s.chunk + 4 * s.steps
        decoder = GpuDecoder(config, DecoderWeights(embedding, layers, norm(), head), length)
        caches = tuple(
            empty_kv_cache(num_blocks, s.kv_heads, BLOCK_SIZE, s.dim, self.dtype, self.device) for _ in range(s.layers)
        )
        info = EngineInfo("random", s.vocabulary, length, BLOCK_SIZE, num_blocks, self.device.type)
        geometry = Geometry(num_blocks, BLOCK_SIZE, s.heads, s.kv_heads, s.dim, s.vocabulary, length)
        graphs = None
        if self.device.type == "cuda":
            graphs = DecodeGraphs(
                partial(decoder.forward, caches=caches), CudaRecorder(), self.device, block_size=BLOCK_SIZE,
                max_num_seqs=max(s.batches), max_model_len=length,
            )  # fmt: skip
        return GpuEngine(decoder, caches, geometry, info, self.device, graphs), sum(w.num_bytes for w in made)

    def _weight(self, rows: int, columns: int, bits: int) -> DeviceWeight:
        scale = columns**-0.5
        if bits == 16:
            weight = torch.randn(rows, columns, dtype=self.dtype, device=self.device) * scale
            return prepare(weight, self.dtype, self.device)
        if bits == 8:
            q = (torch.randn(rows, columns, device=self.device) * 100).to(torch.float8_e4m3fn)
            return ScaledWeight(q, torch.full((1, rows), scale / 100, device=self.device))
        codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, device=self.device)
        scales = torch.full((rows, max(1, columns // 128)), scale / (1 << bits - 2), device=self.device)
        return prepare(GroupedCodes(bits, codes, scales, centre=1 << bits - 1), self.dtype, self.device)

    def model(self, bits: int) -> Iterator[Row]:
        s = self.sizes
        blocks_each = -(-(s.context + 4 * s.steps + 1) // BLOCK_SIZE)
        most = max(max(s.batches) * blocks_each, -(-s.chunk // BLOCK_SIZE))
        with torch.inference_mode():
            engine, weight_bytes = self.engine(bits, most)
        kv_bytes = 2 * s.layers * s.kv_heads * s.dim * self.dtype.itemsize  # a token
        name = f"{bits}-bit weights"
        for batch in s.batches:
            sequences = [_sequence(s.context + 1, range(i * blocks_each, (i + 1) * blocks_each)) for i in range(batch)]
            _decode(engine, sequences, s.steps)  # until graphs are recorded
            started = time.perf_counter()
            _decode(engine, sequences, s.steps)
            taken = (time.perf_counter() - started) / s.steps
            floor = (weight_bytes + batch * s.context * kv_bytes) / self.bytes_s
            yield {"what": f"{name}: decode, batch {batch}, context {s.context}", "ms": taken * 1e3,
                   "of floor": floor / taken, "tok/s": batch / taken, **_goal(bits, batch)}  # fmt: skip
        yield from self._verification(engine, name, blocks_each)
        prompt = _sequence(s.chunk, range(most))
        chunk = [Chunk(prompt, 0, s.chunk, True)]
        engine.step(chunk)
        started = time.perf_counter()
        engine.step(chunk)
        taken = time.perf_counter() - started
        floor = 2 * s.chunk * weight_bytes * 8 / bits / self.flops_s
        yield {"what": f"{name}: prompt of {s.chunk}", "ms": taken * 1e3, "of floor": floor / taken,
               "tok/s": s.chunk / taken}  # fmt: skip
        yield self._alone_and_together(engine, name, blocks_each)

    def _verification(self, engine: GpuEngine, name: str, blocks_each: int) -> Iterator[Row]:
        """A step of 8 rows a sequence, as its last token with 7 drafts is, over one of one row; without graphs both."""
        for batch in self.sizes.batches:
            taken = []
            for num_rows in (1, 8):
                chunks = [
                    Chunk(_sequence(self.sizes.context + 8, range(i * blocks_each, (i + 1) * blocks_each)),
                          self.sizes.context + 8 - num_rows, num_rows, True)
                    for i in range(batch)
                ]  # fmt: skip
                engine.step(chunks)
                taken.append(self.seconds(lambda chunks=chunks: engine.step(chunks), 5))
            yield {"what": f"{name}: 8 rows, batch {batch}", "ms": taken[1] * 1e3, "of one": taken[1] / taken[0],
                   "goal": 1.3}  # fmt: skip

    def _alone_and_together(self, engine: GpuEngine, name: str, blocks_each: int) -> Row:
        def drawn(count: int) -> list[int]:
            sequences = [_sequence(9, range(i * blocks_each, (i + 1) * blocks_each), seed=i) for i in range(count)]
            engine.step([Chunk(q, 0, 9, False) for q in sequences])
            _decode(engine, sequences, self.sizes.steps)
            return sequences[0].token_ids[9:]

        same = drawn(1) == drawn(max(self.sizes.batches))
        return {"what": f"{name}: tokens alone and among others", "failed": not same}


def _goal(bits: int, batch: int) -> Row:
    """What the step's part of the floor should be."""
    goals = {(16, 1): 0.70, (8, 1): 0.60, (4, 1): 0.50}
    goal = 0.65 if batch == 64 else goals.get((bits, batch))
    return {} if goal is None else {"goal": goal}


def _sequence(num_tokens: int, block_ids: range, seed: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=1 << 16, temperature=1.0, seed=seed)
    ids = [(7 * i + seed) % 256 for i in range(num_tokens)]
    return Sequence(
        sid=f"b{block_ids[0]}", epoch=1, choice=0, params=params, num_prompt_tokens=num_tokens, token_ids=ids,
        block_ids=list(block_ids),
    )  # fmt: skip


def _decode(engine: GpuEngine, sequences: list[Sequence], steps: int) -> None:
    """Each step begins before the one before has ended."""
    before: tuple[list[Chunk], Any] | None = None
    first = len(sequences[0].token_ids) - 1
    for number in range(steps):
        chunks = [Chunk(q, first + number, 1, True) for q in sequences]
        step = engine.begin(chunks)
        _take(before)
        before = chunks, step
    _take(before)


def _take(step: tuple[list[Chunk], Any] | None) -> None:
    if step is not None:
        for chunk, drawn in zip(step[0], step[1].results(), strict=True):
            chunk.seq.token_ids.append(drawn[0].token_id)


def table(rows: list[Row]) -> str:
    columns = COLUMNS
    lines = [f"{'':52}" + "".join(f"{c:>11}" for c in columns)]
    for row in rows:
        cells = "".join(f"{row[c]:11.4g}" if c in row else " " * 11 for c in columns)
        lines.append(
            f"{row['what']:52}{cells}{'  FAILED' if row.get('failed') else ''}  {row.get('note', '')}".rstrip()
        )
    return "\n".join(lines)


def markdown(head: str, rows: list[Row]) -> str:
    lines = [f"# {head}", "", f"| | {' | '.join(COLUMNS)} | |", "|---" * (2 + len(COLUMNS)) + "|"]
    for row in rows:
        cells = (f"{row[c]:.4g}" if c in row else "" for c in COLUMNS)
        note = f"{'FAILED ' if row.get('failed') else ''}{row.get('note', '')}"
        lines.append(f"| {row['what']} | {' | '.join(cells)} | {note} |")
    return "\n".join(lines) + "\n"


def collected(sections: Seq[tuple[str, Callable[[], Iterable[Row]]]], minutes: float) -> list[Row]:
    """Rows of the sections, one after the other; one that fails is a row, and what there is no time for another."""
    ends = time.monotonic() + 60 * minutes
    rows: list[Row] = []
    for name, section in sections:
        if time.monotonic() >= ends:
            rows.append({"what": name, "note": "left out: the time was over"})
            continue
        try:
            for row in section():
                rows.append(row)
                if time.monotonic() >= ends:
                    rows.append({"what": name, "note": "cut short: the time was over"})
                    break
        except Exception as e:  # of whatever is being tried: it must not cost the results of all the others
            rows.append({"what": name, "failed": True, "note": f"{type(e).__name__}: {e}".partition("\n")[0]})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def _sections(bench: Bench, tiny: bool, model: str, scratch: Path) -> list[tuple[str, Callable[[], Iterable[Row]]]]:
    worker, server = {"device": "cuda"} | ({"model": model} if model else {}), {}
    load, timeout_s = ((4, 8), 100.0) if tiny else ((16, 256), 150.0)

    def served() -> Path:
        return scratch if tiny else model_source.resolve(model or CommonSettings().model, default_cache_dir()).path

    if tiny:
        save("llama", scratch)
        worker, server = {"device": "cpu", "engine": "torch", "model": str(scratch)}, {"engine": "scripted"}
    return [
        ("ceilings", lambda: [bench.ceilings()]),
        ("ops", bench.ops),
        ("others", bench.others),
        *((f"{bits}-bit weights", partial(bench.model, bits)) for bits in (16, 4, 8)),
        ("guesses", lambda: gpu_speculation.rows(served(), bench.device, *((2, 4) if tiny else (8, 64)), scratch)),
        ("speculation", partial(gpu_serving.speculation, worker, load, timeout_s)),
        ("stack", partial(gpu_serving.stack, server or worker, load, timeout_s)),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="for results")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, also without a GPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing more is begun (%(default)s)")
    parser.add_argument("--model", default="", help="that is served, as for `headrace serve`; the default one")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny shows that this runs")
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(TINY if options.tiny else CARD, device)
    with tempfile.TemporaryDirectory() as scratch:
        rows = collected(_sections(bench, options.tiny, options.model, Path(scratch)), options.minutes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    options.folder.mkdir(parents=True, exist_ok=True)
    found = {"device": name, "torch": torch.__version__, "tiny": options.tiny, "rows": rows}
    (options.folder / "gpu.json").write_text(json.dumps(found, indent=1))
    (options.folder / "gpu.md").write_text(markdown(f"{name}, torch {torch.__version__}", rows))
    sys.stdout.write(f"{name}, torch {torch.__version__}\n{table(rows)}\n")
    return 1 if any(row.get("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
