"""The default model's own head on a GPU's ops, with kernels' specifications: it guesses what it does on native ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.heads_loading import heads_of
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative.head_proposer import HeadProposer
from services.gpu_worker.speculative.native_eagle import Guess, Wanted
from shared.settings import WorkerSettings
from tests.gpu_worker.any_engine import load_gpu, load_native
from tests.gpu_worker.head_models import read_rows
from tests.gpu_worker.test_default_model import model_path
from tests.gpu_worker.tiny_models import Runner

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
BEGINNINGS = [[504, 3575, 282, 4649, 314], [6403, 4145, 253, 655, 665, 436], [1, 4093, 198, 1780, 314, 260]]
NUM_GUESSES = 4


def guesses(engine: NativeEngine | GpuEngine, texts: list[list[int]]) -> list[list[Guess]]:
    heads = heads_of(WorkerSettings(speculative_config='{"method": "eagle3"}', block_size=16), model_path(), Path())
    assert heads is not None
    proposer = heads.load(engine)
    assert isinstance(proposer, HeadProposer)
    head: Any = proposer._head
    runner, found = Runner(engine), []
    for text in texts:
        taps = read_rows(engine, text, head.config.tap_layers)[:-1]
        found += head.guess([Wanted(runner.sequence(text, 8), 0, taps, NUM_GUESSES)])
    return found


def test_guesses_are_the_native_heads() -> None:
    """Of 4 bits both, of the model's file both; rows and activations are rounded there and floats here."""
    native = load_native(model_path(), num_blocks=200, block_size=16)
    runner = Runner(native)
    sequences = [runner.sequence(ids, 16) for ids in BEGINNINGS]
    runner.run(sequences)
    texts = [seq.token_ids for seq in sequences]
    want = guesses(native, texts)
    got = guesses(load_gpu(model_path(), num_blocks=200, block_size=16), texts)
    same = [a.token_id == b.token_id for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(same) >= 0.9 * len(texts) * NUM_GUESSES
    first = torch.tensor([[own[0].logprob for own in found] for found in (got, want)])
    assert (first[0] - first[1]).abs().max() < 0.3
