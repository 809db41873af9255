"""The native decoder alone: logits of every row of a chunk, as verifying drafts needs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.gpu_worker.batch import Chunk
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.native_inputs import build_native_inputs
from tests.gpu_worker.any_engine import load_native
from tests.gpu_worker.tiny_models import Runner, prompts, save


def logits_of_every_row(engine: NativeEngine, chunks: list[Chunk]) -> tuple[torch.Tensor, list[int]]:
    inputs = build_native_inputs(chunks, engine._geometry)
    logits, drawn = engine.decoder.forward(replace(inputs, sample_rows=list(range(len(inputs.token_ids)))))
    return logits.clone(), drawn


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_of_a_chunk_are_those_of_single_steps(tmp_path: Path, num_threads: int) -> None:
    """Chunks of 1 to 19 rows of several sequences, at odd places."""
    save("llama", tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=8 << 20)
    engine.decoder.set_num_threads(num_threads)
    runner = Runner(engine)
    texts = [*prompts(3, low=40, high=60), *prompts(1, seed=2, low=505, high=506)]
    sequences = [runner.sequence(text, 1) for text in texts]
    counts = [1, 5, 19, 13]
    starts = [len(s.token_ids) - count for s, count in zip(sequences, counts, strict=True)]
    history = [Chunk(s, 0, start, sample=False) for s, start in zip(sequences, starts, strict=True)]
    engine.step(history)
    together, drawn = logits_of_every_row(
        engine, [Chunk(s, start, n, sample=True) for s, start, n in zip(sequences, starts, counts, strict=True)]
    )
    assert drawn == together.argmax(-1).tolist()
    alone = [
        logits_of_every_row(engine, [Chunk(s, start + i, 1, sample=True)])[0]
        for s, start, n in zip(sequences, starts, counts, strict=True) for i in range(n)
    ]  # fmt: skip
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_keys_that_several_threads_share_give_the_bits_of_one(tmp_path: Path, kv_cache_dtype: str) -> None:
    """One thread attends to all keys in a piece; several take splits of them where there are few rows."""
    save("llama", tmp_path, max_position_embeddings=2048)
    engine = load_native(tmp_path, kv_cache_bytes=8 << 20, kv_cache_dtype=kv_cache_dtype)
    runner = Runner(engine)
    sequences = [runner.sequence(prompts(1, seed=n, low=n, high=n + 1)[0], 1) for n in (1300, 1027, 20)]
    engine.step([Chunk(s, 0, len(s.token_ids) - 5, sample=False) for s in sequences])
    steps = [
        [Chunk(s, len(s.token_ids) - count, count, sample=True) for s in some]
        for some in (sequences[:1], sequences[1:], sequences[2:]) for count in (5, 1)
    ]  # fmt: skip
    alone = [logits_of_every_row(engine, chunks) for chunks in steps]
    for num_threads in (2, 5):
        engine.decoder.set_num_threads(num_threads)
        for chunks, (logits, drawn) in zip(steps, alone, strict=True):
            shared = logits_of_every_row(engine, chunks)
            assert torch.equal(shared[0], logits)
            assert shared[1] == drawn
