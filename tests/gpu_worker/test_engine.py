"""The engine's edges: what it refuses, what it reports of itself, and that a bad sequence harms no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine import TorchEngine, context_length
from services.gpu_worker.model.config import NotNativeError
from services.gpu_worker.model.hf_config import config_from_hf
from services.gpu_worker.step_inputs import SequenceError
from tests.gpu_worker.test_model_config import HF
from tests.gpu_worker.tiny_models import Runner, ids_of, prompts, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save("llama", path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return TorchEngine.load(folder, kv_cache_bytes=8 << 20)


def test_info(engine: TorchEngine) -> None:
    info = engine.info
    block_bytes = 2 * 3 * 2 * 16 * 16 * 4
    assert (info.vocab_size, info.max_model_len, info.block_size, info.device) == (300, 512, 16, "cpu")
    assert info.num_blocks == (8 << 20) // block_bytes
    assert info.variant.startswith("cpu-torch-")


def test_variant_names_what_the_numbers_follow_from(folder: Path, engine: TorchEngine, tmp_path: Path) -> None:
    def variant(path: Path = folder, **settings: Any) -> str:
        return TorchEngine.load(path, kv_cache_bytes=4 << 20, **settings).info.variant

    assert variant() == variant(max_model_len=100) == engine.info.variant
    save("llama", tmp_path, seed=1)
    others = [variant(block_size=32), variant(tmp_path)]
    others += [variant(kv_cache_dtype=name) for name in ("float16", "int8", "fp8_e4m3")]
    assert len({engine.info.variant, *others}) == 6


def test_an_empty_step(engine: TorchEngine) -> None:
    assert engine.step([]) == []


def test_results_come_in_the_order_of_the_chunks(engine: TorchEngine) -> None:
    runner = Runner(engine)
    texts = prompts(3)
    want = ids_of(runner.run([runner.sequence(p, 1) for p in texts]))
    a, b, c = (runner.sequence(p, 1) for p in texts)
    runner.step([Chunk(b, 0, len(texts[1]) - 1, False)])
    chunks = [Chunk(a, 0, len(texts[0]), True), Chunk(b, len(texts[1]) - 1, 1, True), Chunk(c, 0, 2, False)]
    results = engine.step(chunks)
    assert ids_of(results) == [want[0], want[1], []]


def test_a_step_may_be_repeated(engine: TorchEngine) -> None:
    runner = Runner(engine)
    sequence = runner.sequence(prompts(1)[0], 5, temperature=1.0)
    chunk = Chunk(sequence, 0, len(sequence.token_ids), True)
    assert engine.step([chunk]) == engine.step([chunk])


def test_sequences_are_not_modified(engine: TorchEngine) -> None:
    sequence = Runner(engine).sequence(prompts(1)[0], 5)
    before = dataclasses.replace(sequence, token_ids=list(sequence.token_ids), block_ids=list(sequence.block_ids))
    engine.step([Chunk(sequence, 0, len(sequence.token_ids), True)])
    assert sequence == before


def test_bad_sequences_fail_before_anything_is_computed(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(engine)
    good, bad = runner.sequence([1, 2, 3], 4), runner.sequence([1, 2, 3], 4)
    bad.token_ids[1] = 300
    monkeypatch.setattr(engine._decoder, "forward", None)
    with pytest.raises(SequenceError, match="vocabulary") as caught:
        engine.step([Chunk(good, 0, 3, True), Chunk(bad, 0, 3, True)])
    assert caught.value.sid == bad.sid


def test_numbers_that_are_none_end_one_sequence(engine: TorchEngine) -> None:
    """Its blocks hold NaN; it is named, its neighbour is not touched, and the blocks' next owner does not see it."""
    runner = Runner(engine)
    texts = prompts(2)
    want = ids_of(runner.run([runner.sequence(p, 6) for p in texts]))
    good, bad = (runner.sequence(p, 6) for p in texts)
    with torch.inference_mode():
        for cache in engine._pool.layers:
            cache.k[bad.block_ids] = torch.nan
            cache.v[bad.block_ids] = torch.nan
    cached = min(16, len(texts[1]) - 1)
    chunks = [Chunk(good, 0, len(texts[0]), True), Chunk(bad, cached, len(texts[1]) - cached, True)]
    with pytest.raises(SequenceError, match="not finite") as caught:
        engine.step(chunks)
    assert caught.value.sid == bad.sid
    assert ids_of(runner.run([good])) == want[:1]
    heir = runner.sequence(texts[1], 6)
    heir.block_ids = bad.block_ids
    assert ids_of(runner.run([heir])) == want[1:]


def test_parameters_are_checked_again(engine: TorchEngine) -> None:
    bad = Runner(engine).sequence([1, 2], 4, logit_bias={300: 1.0})
    with pytest.raises(ValueError, match="logit_bias"):
        engine.step([Chunk(bad, 0, 2, True)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype: 'bfloat16'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: 'fp8'"),
        ({"block_size": 24}, "block_size: 24"),
        ({"block_size": 128}, "block_size: 128"),
        ({"max_model_len": 513}, "max_model_len: 513"),
        ({"max_model_len": 0}, "max_model_len: 0"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes"),
    ],
)
def test_settings_are_refused_by_name(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchEngine.load(folder, **({"kv_cache_bytes": 4 << 20} | settings))


def test_a_context_longer_than_a_window_needs_windows() -> None:
    windowed = config_from_hf(HF | {"architectures": ["MistralForCausalLM"], "sliding_window": 100})
    assert context_length(windowed, 100) == 100
    for asked in (101, None):
        with pytest.raises(NotNativeError, match="sliding_window: 100"):
            context_length(windowed, asked)
    assert context_length(windowed, None, windows=True) == 256
    assert context_length(config_from_hf(HF), None) == 256


def test_the_default_pool_is_bounded_by_use(folder: Path) -> None:
    engine = TorchEngine.load(folder, max_model_len=64)
    assert engine.info.num_blocks <= 256 * 4
