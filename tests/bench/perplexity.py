"""Perplexity of a text as llama-perplexity counts it: `python -m tests.bench.perplexity MODEL.gguf TEXT [--engine E]`.

Windows of `--context` tokens, the first token of each replaced by the beginning-of-text token where the model has one
added; the second half of each window counts.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from services.gateway.gguf_tokenizer import build
from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.engines import load_engine
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.native_inputs import build_native_inputs
from services.gpu_worker.step_inputs import build_step_inputs
from shared.gguf_header import read_gguf
from shared.model_source import default_cache_dir
from tests.gpu_worker.tiny_models import Runner


def window_logits(engine: NativeEngine | TorchEngine, ids: list[int], first: int) -> torch.Tensor:
    """Of the positions from first to the last but one."""
    sequence = Runner(engine).sequence(ids, 1)
    chunks = [Chunk(sequence, 0, len(ids), sample=True)]
    rows = range(first, len(ids) - 1)
    with torch.inference_mode():
        if isinstance(engine, NativeEngine):
            inputs = replace(build_native_inputs(chunks, engine._geometry), sample_rows=np.array(rows, np.int32))
            return engine.decoder.forward(inputs)[0]
        torch_inputs = replace(build_step_inputs(chunks, engine._geometry), sample_rows=torch.tensor(rows))
        return engine._decoder.forward(torch_inputs, engine._pool)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("model", type=Path)
    ap.add_argument("text", type=Path)
    ap.add_argument("--engine", default="auto")
    ap.add_argument("--context", type=int, default=512)
    ap.add_argument("--max-windows", type=int, default=1000)
    args = ap.parse_args()
    header = read_gguf(args.model)
    tokenizer = build(header.metadata).backend
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    adds_bos = header.metadata.get("tokenizer.ggml.add_bos_token", False)
    bos = header.metadata["tokenizer.ggml.bos_token_id"] if adds_bos else None
    engine = load_engine(args.engine, args.model, default_cache_dir(), num_threads=2, kv_cache_bytes=1 << 26)
    total, count = 0.0, 0
    for start in range(0, min(len(ids) // args.context, args.max_windows) * args.context, args.context):
        window = ids[start : start + args.context]
        if bos is not None:
            window[0] = bos
        first = args.context // 2
        logprobs = window_logits(engine, window, first).double().log_softmax(-1)
        targets = torch.tensor(window[first + 1 :])
        total -= float(logprobs.gather(1, targets.unsqueeze(1)).sum())
        count += len(targets)
    sys.stdout.write(f"{engine.info.variant}: perplexity {math.exp(total / count):.4f} over {count} tokens\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
