"""Engines behind one face, for tests that hold for any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.native_inputs import build_native_inputs
from services.gpu_worker.step_inputs import build_step_inputs
from tests.gpu_worker.tiny_models import Runner, next_chunk
from tests.kernels.native_libraries import best_library
from tests.kernels.threads import torch_threads

AnyEngine = TorchEngine | NativeEngine


def load_torch(path: Path, **settings: Any) -> TorchEngine:
    return TorchEngine.load(path, **settings)


def load_native(path: Path, **settings: Any) -> NativeEngine:
    """Skips the test where there is no compiler."""
    with torch_threads(1):
        return NativeEngine.load(path, best_library(), num_threads=1, **settings)


def load_gpu(path: Path, **settings: Any) -> GpuEngine:
    """On the CPU: with kernels' specifications, or, where Triton interprets, with the kernels."""
    return GpuEngine.load(path, torch.device("cpu"), **settings)


def last_logits(engine: AnyEngine, texts: list[list[int]], chunk: int = 13) -> torch.Tensor:
    """[texts, vocab_size]: what follows each text, computed together in chunks."""
    runner = Runner(engine)
    sequences = [runner.sequence(text, 1) for text in texts]
    rows: dict[int, torch.Tensor] = {}
    while open_ones := [i for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]:
        chunks = [next_chunk(sequences[i], chunk) for i in open_ones]
        for number, row in zip(*_forward(engine, chunks), strict=True):
            rows[open_ones[number]] = row
        for c in chunks:
            c.seq.num_computed += c.count
    return torch.stack([rows[i] for i in range(len(texts))])


def _forward(engine: AnyEngine, chunks: list[Chunk]) -> tuple[tuple[int, ...], torch.Tensor]:
    """Numbers of the chunks that are sampled, and their logits."""
    with torch.inference_mode():
        if isinstance(engine, NativeEngine):
            native = build_native_inputs(chunks, engine._geometry)
            return native.sample_chunks, engine.decoder.forward(native)[0].clone()
        inputs = build_step_inputs(chunks, engine._geometry)
        return inputs.sample_chunks, engine._decoder.forward(inputs, engine._pool)


def logits_along(engine: AnyEngine, texts: list[list[int]], num_prompt: list[int], chunk: int = 13) -> torch.Tensor:
    """[texts, steps, vocab_size]: what follows each prompt, in chunks, and each later token, one by one; all of them
    together. Texts have as many tokens after their prompts as one another."""
    runner = Runner(engine)
    sequences = [runner.sequence(text, 1) for text in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while open_ones := [i for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]:
        chunks = []
        for i in open_ones:
            done = sequences[i].num_computed
            count = min(chunk, num_prompt[i] - done) if done < num_prompt[i] else 1
            chunks.append(Chunk(sequences[i], done, count, sample=done + count >= num_prompt[i]))
        for number, row in zip(*_forward(engine, chunks), strict=True):
            rows[open_ones[number]].append(row)
        for c in chunks:
            c.seq.num_computed += c.count
    return torch.stack([torch.stack(own) for own in rows])


@contextlib.contextmanager
def engine_threads(engine: AnyEngine, count: int) -> Iterator[None]:
    if isinstance(engine, NativeEngine):
        engine.decoder.set_num_threads(count)
        count = 1  # torch draws there, on one thread
    with torch_threads(count):
        yield
