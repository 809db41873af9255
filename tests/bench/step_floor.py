"""A step of one sequence against the time that reading its bytes takes: `python -m tests.bench.step_floor MODEL N`.

N: threads. Read bandwidth is measured before and after the steps, the better one counts. Best times of many, since
what disturbs only ever makes slower. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from kernels.native import build
from kernels.native.library import Pool
from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.native_engine import NativeEngine
from shared.model_source import default_cache_dir
from shared.protocol import SamplingParams
from tests.bench.bench_native_ops import best_seconds, read_bandwidth, say

SECONDS = 2.0
CONTEXT = 64


def main(model: Path, threads: int) -> None:
    library = build.load(default_cache_dir() / "native", lambda line: None)
    engine = NativeEngine.load(model, library, num_threads=threads, kv_cache_bytes=1 << 26)
    num_blocks = -(-(CONTEXT + 1) // engine.info.block_size)
    sequence = Sequence(
        sid="s", epoch=1, choice=0, params=SamplingParams(max_tokens=4, temperature=0.0, seed=0),
        num_prompt_tokens=CONTEXT, token_ids=[5] * (CONTEXT + 1), block_ids=list(range(num_blocks)),
    )  # fmt: skip
    engine.step([Chunk(sequence, 0, CONTEXT, sample=False)])
    pool = Pool(library, threads)
    before = read_bandwidth(library, pool, SECONDS)
    step = best_seconds(partial(engine.step, [Chunk(sequence, CONTEXT, 1, sample=True)]), SECONDS)
    bandwidth = max(before, read_bandwidth(library, pool, SECONDS))
    pool.close()
    num_bytes = engine.decoder.num_weight_bytes
    ratio = step / (num_bytes / bandwidth / 1e9)
    say(json.dumps({"step_ms": step * 1e3, "num_bytes": num_bytes, "bandwidth_gb_s": bandwidth, "ratio": ratio}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
