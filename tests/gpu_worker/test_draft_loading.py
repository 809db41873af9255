"""A draft model's engine: as many blocks as the target's, whose memory is counted before either is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels.native import build
from kernels.native.build import NoNativeOps
from services.gpu_worker.device import DeviceOptions
from services.gpu_worker.draft_loading import Draft, draft_of
from services.gpu_worker.drafters import make_drafter
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.engines import load_engine
from services.gpu_worker.gpu_engine import GpuEngine, StepLimits
from services.gpu_worker.gpu_memory import NOTHING_BESIDE
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.speculator import Speculator
from services.gpu_worker.speculative.vocab_map import MappedEngine
from services.gpu_worker.weights.loader import open_source
from services.gpu_worker.weights.outline import outline
from shared import settings
from shared.model_source import ModelSource
from shared.settings import WorkerSettings
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.any_engine import load_torch
from tests.gpu_worker.test_gpu_engine import MadeUpCard
from tests.gpu_worker.tiny_models import save
from tests.kernels.threads import torch_threads

CPU = torch.device("cpu")
KV_BYTES = 1 << 20
WORDS = [f"w{n}" for n in range(300)]


def source(folder: Path, words: list[str] | None = WORDS, seed: int = 0) -> ModelSource:
    save("llama", folder, seed=seed)
    if words:
        tokenizer = {"model": {"vocab": {w: i for i, w in enumerate(words)}}, "decoder": {"type": "ByteLevel"}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return ModelSource(folder.name, folder, "hf")


def make_draft(model: ModelSource, tmp_path: Path) -> Draft:
    return Draft(model, "torch", tmp_path, 1, block_size=8)


def target_of(model: ModelSource, draft: Draft) -> TorchEngine:
    return load_torch(
        model.path, kv_cache_bytes=KV_BYTES, block_size=8, num_threads=1, draft_block_bytes=draft.block_bytes()
    )


def test_both_pools_together_are_as_large_as_the_setting_says(tmp_path: Path) -> None:
    target, draft = source(tmp_path / "a"), make_draft(source(tmp_path / "b", seed=1), tmp_path)
    engine = target_of(target, draft)
    own = draft.load(target, engine.info)
    assert isinstance(own, TorchEngine) and own.info.num_blocks == engine.info.num_blocks
    pools = [t for e in (engine, own) for layer in e._pool.layers for t in (layer.k, layer.v)]
    held = sum(t.numel() * t.element_size() for t in pools)
    block_bytes = held // (engine.info.num_blocks + 1)
    assert KV_BYTES - block_bytes < block_bytes * engine.info.num_blocks <= KV_BYTES


def test_without_native_ops_its_blocks_are_counted_as_torch_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(tmp_path / "b", None)
    text = json.dumps({"method": "draft_model", "model": str(tmp_path / "b")})
    own = settings.load(WorkerSettings, {settings.variable("speculative_config"): text})

    def no_ops(folder: Path, say: object) -> None:
        raise NoNativeOps("there is no compiler")

    native, draft = draft_of(own, "native", 1, tmp_path), draft_of(own, "auto", 1, tmp_path)
    monkeypatch.setattr(build, "load", no_ops)
    assert draft is not None and native is not None
    assert draft.block_bytes() == 2 * native.block_bytes(), "float32, and float16"


def test_its_context_is_no_longer_than_the_served_one(tmp_path: Path) -> None:
    source(tmp_path / "b", None)
    longest = open_source(tmp_path / "b").config.max_position_embeddings
    text = json.dumps({"method": "draft_model", "model": str(tmp_path / "b")})
    for asked, want in ((40, 40), (2 * longest, longest), (0, longest)):
        changes = {"speculative_config": text, "max_model_len": str(asked)}
        own = settings.load(WorkerSettings, {settings.variable(name): value for name, value in changes.items()})
        target = load_torch(tmp_path / "b", kv_cache_bytes=KV_BYTES, block_size=own.block_size)
        draft = draft_of(own, "torch", 1, tmp_path)
        assert draft is not None and draft.load(draft.source, target.info).info.max_model_len == want


def test_other_words_are_mapped_and_too_few_of_them_are_refused(tmp_path: Path) -> None:
    target = source(tmp_path / "a")
    for share, folder in ((200, "b"), (100, "c")):
        draft = make_draft(source(tmp_path / folder, [*WORDS[:share], *(f"x{n}" for n in range(share, 300))]), tmp_path)
        engine = target_of(target, draft)
        if share == 200:
            assert isinstance(draft.load(target, engine.info), MappedEngine)
            continue
        with pytest.raises(ConfigError, match="speculative_config: model: 100 of its 300 tokens"):
            draft.load(target, engine.info)


def test_what_cannot_be_loaded_or_compared_is_an_error_of_the_setting(tmp_path: Path) -> None:
    target, nameless = source(tmp_path / "a"), make_draft(source(tmp_path / "b", None), tmp_path)
    engine = target_of(target, nameless)
    with pytest.raises(ConfigError, match="speculative_config: model: its vocabulary cannot be compared"):
        nameless.load(target, engine.info)
    (tmp_path / "b" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": "many"}')
    with pytest.raises(ConfigError, match="speculative_config: model: "):
        nameless.block_bytes()


def test_a_model_is_drafted_with_where_the_settings_name_one(tmp_path: Path) -> None:
    source(tmp_path / "b", None)
    text = json.dumps({"method": "draft_model", "model": str(tmp_path / "b"), "quantization": "int8"})
    own = settings.load(WorkerSettings, {settings.variable("speculative_config"): text})
    draft = draft_of(own, "torch", 2, tmp_path)
    assert draft is not None and (draft.source.path, draft.quantization) == (tmp_path / "b", "int8")
    assert draft_of(settings.load(WorkerSettings, {}), "torch", 2, tmp_path) is None


def test_the_served_model_itself_needs_no_names(tmp_path: Path) -> None:
    target = source(tmp_path / "a", None)
    draft = make_draft(target, tmp_path)
    engine = target_of(target, draft)
    own = draft.load(target, engine.info)
    assert isinstance(own, TorchEngine)
    config = SpeculativeConfig(method="draft_model", model="x")
    assert isinstance(make_drafter(config, engine, own, 0.1), ModelSpeculator)
    assert isinstance(make_drafter(SpeculativeConfig(method="suffix"), engine, None, 0.1), Speculator)
    assert make_drafter(None, engine, None, 0.1) is None


def test_on_a_gpu_both_have_their_parts_of_the_memory(tmp_path: Path) -> None:
    """Of kv_cache_bytes, or of what the card has left for weights, steps and pools of both."""
    target, draft = source(tmp_path / "a"), make_draft(source(tmp_path / "b", seed=1), tmp_path)
    limits, options = StepLimits(600, 3, 0.5), DeviceOptions()
    beside = draft.on_card(CPU, limits, options)
    loaded = {"aside": draft, "num_threads": 1, "block_size": 8, "device": CPU, "limits": limits}
    with torch_threads(1):
        engine = load_engine("auto", target.path, tmp_path, kv_cache_bytes=KV_BYTES, **loaded)
        own = draft.load(target, engine.info, CPU, limits, options)
    assert isinstance(engine, GpuEngine) and isinstance(own, GpuEngine)
    assert own.info.num_blocks == engine.info.num_blocks and own.info.on_card
    blocks = [sum(t.nbytes for cache in e._caches for t in cache.tensors()) // e.info.num_blocks for e in (engine, own)]
    assert beside.block_bytes == blocks[1] and engine.info.num_blocks == KV_BYTES // sum(blocks)
    assert beside.weight_bytes == outline(draft.source.path).device_bytes(torch.float32)
    alone, both = (
        GpuEngine.load(
            target.path, CPU, block_size=8, limits=limits, beside=each,
            card=MadeUpCard(1 << 30, 1 << 30, taken=400 << 20, step=90 << 20),
        ).info.num_blocks
        for each in (NOTHING_BESIDE, beside)
    )  # fmt: skip
    left = (512 << 20) - (490 << 20)
    assert alone == left // blocks[0]
    assert both == (left - beside.weight_bytes - beside.step_bytes) // sum(blocks) < alone


@pytest.mark.parametrize("share", [300, 200])
def test_on_a_gpu_words_are_mapped_there(tmp_path: Path, share: int) -> None:
    target = source(tmp_path / "a")
    draft = make_draft(source(tmp_path / "b", [*WORDS[:share], *(f"x{n}" for n in range(share, 300))]), tmp_path)
    engine = GpuEngine.load(target.path, CPU, kv_cache_bytes=KV_BYTES, block_size=8)
    with torch_threads(1):
        own = draft.load(target, engine.info, CPU)
    if share == 300:
        assert isinstance(own, GpuEngine)
    else:
        assert isinstance(own, MappedEngine) and isinstance(own._engine, GpuEngine)
