"""Speed of the native ops on this machine: `python -m tests.bench.bench_native_ops [MODEL.gguf]`.

Read bandwidth, products on a large layer and on a model's own shapes, a decoder's step against the bytes it reads, and
what drawing tokens adds to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.matmul_a8 import matmul_a8
from kernels.native import build
from kernels.native.library import NativeLibrary, Pool
from kernels.packed_weight import GROUP, Codes, PackedWeight, pack, pack_dense
from kernels.quantize_a8 import QuantizedRows, quantize_a8
from services.gpu_worker.batch import Chunk
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.weights.huge_pages import WeightMemory
from tests.gpu_worker.tiny_models import Runner

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k 40": {"temperature": 1.0, "top_k": 40},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "repetition penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
}
SHAPES = [(14336, 4096), (960, 576), (576, 576), (3072, 576), (576, 1536)]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def random_weight(rows: int, columns: int) -> PackedWeight:
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    d = torch.rand(rows, columns // GROUP).half()
    return pack(Codes("Q4_1", q, d, d))


def all_products(x: QuantizedRows, weights: list[PackedWeight], library: NativeLibrary, pool: Pool) -> None:
    for weight in weights:
        matmul_a8(x, weight, library, pool)


def products(library: NativeLibrary, pool: Pool, seconds: float) -> None:
    for rows, columns in SHAPES:
        # together larger than the caches, so that weights come from memory as in a step
        weights = [random_weight(rows, columns) for _ in range(max(2, 100_000_000 // (rows * columns)))]
        for count in (1, 4, 8, 64):
            x = quantize_a8(torch.randn(count, columns), library)
            spent = best_seconds(partial(all_products, x, weights, library, pool), seconds) / len(weights)
            gops, gbs = 2 * count * rows * columns / spent / 1e9, weights[0].num_bytes / spent / 1e9
            say(f"product {rows} x {columns}, {count:3} rows: {spent * 1e6:8.1f} us {gops:6.0f} GOP/s {gbs:5.1f} GB/s")


def read_bandwidth(library: NativeLibrary, pool: Pool, seconds: float) -> float:
    """GB/s of a product with one row of float32: little to compute, everything to read."""
    weight = WeightMemory().keep(pack_dense(torch.randn(16384, 4096)))
    x = quantize_a8(torch.randn(1, 4096), library)
    return weight.num_bytes / best_seconds(lambda: matmul_a8(x, weight, library, pool), seconds) / 1e9


def steps(model: Path, library: NativeLibrary, threads: int, seconds: float, bandwidth: float) -> None:
    engine = NativeEngine.load(model, library, num_threads=threads, kv_cache_bytes=1 << 28)
    weights = engine.decoder.num_weight_bytes
    for batch in (1, 4, 8, 16, 32):
        runner = Runner(engine)
        sequences = [runner.sequence([5] * 64, 4) for _ in range(batch)]
        runner.run(sequences)
        chunks = [Chunk(s, len(s.token_ids) - 1, 1, sample=True) for s in sequences]
        spent = best_seconds(partial(engine.step, chunks), seconds)
        floor = weights / bandwidth / 1e9
        say(f"step of {batch:2}: {spent * 1e3:6.2f} ms, {spent / floor:.2f} x (bytes read / bandwidth)")
    for count in (64, 512):
        runner = Runner(engine)
        sequence = runner.sequence([5] * count, 4)
        chunk = [Chunk(sequence, 0, count, sample=True)]
        spent = best_seconds(partial(engine.step, chunk), seconds)
        say(f"prompt of {count}: {spent * 1e3:6.1f} ms, {count / spent:.0f} tok/s")


def sampling(model: Path, library: NativeLibrary, threads: int, seconds: float) -> None:
    """What drawing costs a step, against greedy decoding of the same sequences measured beside it."""
    engine = NativeEngine.load(model, library, num_threads=threads, kv_cache_bytes=1 << 28)
    for batch in (1, 8, 32):
        for name, params in SAMPLING.items():
            spent = []
            for asked in ({"temperature": 0.0}, params):
                runner = Runner(engine)
                sequences = [runner.sequence([5] * 64, 4, **asked) for _ in range(batch)]
                runner.run(sequences)
                chunks = [Chunk(s, len(s.token_ids) - 1, 1, sample=True) for s in sequences]
                spent.append(best_seconds(partial(engine.step, chunks), seconds))
            say(f"step of {batch:2}, {name}: {spent[1] * 1e3:6.2f} ms, {spent[1] / spent[0]:.2f} x greedy")


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("model", type=Path, nargs="?")
    ap.add_argument("--folder", type=Path, default=build.BUILT, help="where built libraries lie")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    ap.add_argument("--isa", default="", help="one of build.ISAS; the best when empty")
    ap.add_argument("--skip-products", action="store_true")
    args = ap.parse_args()
    if args.isa:
        isa = next(i for i in build.ISAS if i.name == args.isa)
        if not (args.folder / build.file_name(isa)).is_file():
            build.build(isa, args.folder, say)
        library = NativeLibrary(args.folder / build.file_name(isa), isa.name)
    else:
        library = build.load(args.folder, say)
    pool = Pool(library, args.threads)
    bandwidth = read_bandwidth(library, pool, args.seconds)
    say(f"{library.name}, {args.threads} threads, read bandwidth {bandwidth:.1f} GB/s")
    if not args.skip_products:
        products(library, pool, args.seconds)
    pool.close()
    if args.model:
        steps(args.model, library, args.threads, args.seconds, bandwidth)
        sampling(args.model, library, args.threads, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
