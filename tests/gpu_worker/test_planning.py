"""Plans: as many bytes as engines then have, a GPU's on the CPU with a made-up card, and the command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.packed_weight import PackedWeight, packed_bytes
from services.gpu_worker.commands import plan as command
from services.gpu_worker.device import DeviceOptions
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.gpu_engine import GpuEngine, StepLimits
from services.gpu_worker.gpu_memory import Beside
from services.gpu_worker.heads_loading import Heads, heads_of
from services.gpu_worker.model.parameters import parameters
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.planning import Limits, draft_beside, plan_card, plan_cpu
from services.gpu_worker.speculative.head_proposer import MAX_KEPT_ROWS
from services.gpu_worker.speculative.medusa_proposer import MedusaProposer
from services.gpu_worker.speculative.model_speculator import MAX_CATCH_UP_TOKENS
from services.gpu_worker.weights.loader import open_source
from services.gpu_worker.weights.outline import outline
from shared.settings import WorkerSettings
from tests.gpu_worker.any_engine import AnyEngine, load_native, load_torch
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.head_models import load_tiny, load_tiny_gpu, published, published_medusa
from tests.gpu_worker.quantized_folders import quantize
from tests.gpu_worker.test_default_model import model_path
from tests.gpu_worker.test_gpu_engine import MadeUpCard
from tests.gpu_worker.test_quantization import SIZES
from tests.gpu_worker.tiny_models import ARCHITECTURES, MORE_ARCHITECTURES, save
from tests.kernels.random_weights import TYPES, random_weight
from tests.kernels.threads import torch_threads

LIMITS = Limits(block_size=16, max_num_batched_tokens=64, max_num_seqs=4, kv_cache_bytes=2 << 20)
CARD_LIMITS = dataclasses.replace(LIMITS, max_num_batched_tokens=512, max_num_seqs=64, kv_cache_bytes=None)
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "float16",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}  # fmt: skip


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedWeight):
        for plane in (value.codes, value.high, value.d, value.m, value.sub, value.sub_min):
            yield from tensors_in(plane)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)


def test_a_draft_model_is_counted_as_its_engine_holds_it(tmp_path: Path) -> None:
    save("llama", tmp_path / "a")
    save("qwen3", tmp_path / "b")
    target, draft = (outline(tmp_path / name) for name in "ab")
    alone, other, both = plan_cpu(target, LIMITS), plan_cpu(draft, LIMITS), plan_cpu(target, LIMITS, draft=draft)
    assert both.weight_bytes == alone.weight_bytes + other.weight_bytes
    assert both.step_bytes == alone.step_bytes + other.step_bytes
    assert both.block_bytes == alone.block_bytes + other.block_bytes
    assert both.num_blocks == (2 << 20) // both.block_bytes < min(alone.num_blocks, other.num_blocks)


def test_a_draft_model_on_a_card_is_counted_with_what_it_may_read_at_once(tmp_path: Path) -> None:
    save("llama", tmp_path / "a")
    save("qwen3", tmp_path / "b")
    target, draft = (outline(tmp_path / name) for name in "ab")
    beside = draft_beside(draft, CARD_LIMITS, torch.device("cuda"))
    own = dataclasses.replace(CARD_LIMITS, max_num_batched_tokens=MAX_CATCH_UP_TOKENS + CARD_LIMITS.max_num_seqs)
    alone, both = (plan_card(target, CARD_LIMITS, 4 << 30, each) for each in (Beside(0, 0, 0), beside))
    other = plan_card(draft, own, 4 << 30)
    assert both.weight_bytes == alone.weight_bytes + other.weight_bytes
    assert both.step_bytes == alone.step_bytes + other.step_bytes
    assert both.block_bytes == alone.block_bytes + other.block_bytes
    for num_tokens in (64, 8192):
        changed = dataclasses.replace(CARD_LIMITS, max_num_batched_tokens=num_tokens)
        assert draft_beside(draft, changed, torch.device("cuda")) == beside, "it reads as much at once beside any steps"


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_heads_are_counted_with_their_blocks_and_what_is_kept_for_them(tmp_path: Path, kind: Any) -> None:
    engine = load_tiny(tmp_path / "model")
    if kind == "medusa":
        published_medusa(tmp_path / "model", tmp_path / "head")
    else:
        published(kind, tmp_path / "model", tmp_path / "head", "int4")
    heads = Heads(tmp_path / "head", kind, tmp_path / "model", LIMITS.block_size)
    target, beside = outline(tmp_path / "model"), heads.beside(LIMITS)
    alone, both = plan_cpu(target, LIMITS), plan_cpu(target, LIMITS, beside=beside)
    assert both.block_bytes == alone.block_bytes + heads.block_bytes()
    assert (both.num_blocks < alone.num_blocks) == (kind != "medusa")
    proposer = heads.load(engine)
    weights: Any = proposer._heads._weights if isinstance(proposer, MedusaProposer) else proposer._head._weights
    shared = {id(t) for t in tensors_in(engine.decoder.weights)}
    held = {id(t): t.nbytes for t in tensors_in(weights) if id(t) not in shared and t.dim() > 1}
    assert both.weight_bytes - alone.weight_bytes == pytest.approx(sum(held.values()), rel=0.03)
    num_taps, num_rows = (1, 4 * 4) if kind == "medusa" else (len(proposer._head.config.tap_layers), MAX_KEPT_ROWS)
    assert both.step_bytes - alone.step_bytes > 4 * 64 * num_taps * (num_rows + 2 * 64)


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_heads_on_a_gpu_are_counted_as_they_lie_there(tmp_path: Path, kind: Any, dtype: str) -> None:
    engine = load_tiny_gpu(tmp_path / "model")
    if kind == "medusa":
        published_medusa(tmp_path / "model", tmp_path / "head")
    else:
        published(kind, tmp_path / "model", tmp_path / "head", dtype)
    heads = Heads(tmp_path / "head", kind, tmp_path / "model", LIMITS.block_size)
    limits = StepLimits(64, 4, 0.9)
    beside = heads.on_card(engine.device, limits, DeviceOptions())
    proposer = heads.load(engine)
    weights: Any = proposer._heads._weights if isinstance(proposer, MedusaProposer) else proposer._head._weights
    shared = {t.data_ptr() for t in tensors_in(engine.decoder.weights)}
    held = {t.data_ptr(): t.nbytes for t in tensors_in(weights) if t.data_ptr() not in shared and t.dim() > 1}
    assert beside.weight_bytes == pytest.approx(sum(held.values()), rel=0.03)
    num_taps, num_rows = (1, 4) if kind == "medusa" else (len(proposer._head.config.tap_layers), MAX_KEPT_ROWS)
    assert beside.step_bytes > 4 * 64 * num_taps * (num_rows + 2 * 64)
    pool = [] if isinstance(proposer, MedusaProposer) else proposer._head.cache.tensors()
    assert beside.block_bytes * engine.info.num_blocks == sum(t.nbytes for t in pool)


def held_bytes(engine: AnyEngine | GpuEngine) -> tuple[int, int]:
    """Of weights and of the pool, each piece of memory once."""
    if isinstance(engine, NativeEngine):
        weights = engine.decoder._kept[0]
        caches = [array for cache in engine.decoder.caches for array in (cache.k, cache.v)]
    elif isinstance(engine, GpuEngine):
        weights, caches = engine.decoder.weights, [tensor for cache in engine._caches for tensor in cache.tensors()]
    else:
        weights = engine._decoder.weights
        caches = [tensor for cache in engine._pool.layers for tensor in (cache.k, cache.v)]
    # oneDNN's own layouts have no address
    found = {id(t) if t.is_mkldnn else t.data_ptr(): t.numel() * t.element_size() for t in tensors_in(weights)}
    return sum(found.values()), sum(cache.nbytes for cache in caches)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("rows", [16, 21])
def test_packed_bytes_are_those_of_a_packed_weight(type_name: str, rows: int) -> None:
    assert packed_bytes(type_name, rows, 512) == random_weight(type_name, rows, 512)[0].num_bytes


@pytest.mark.parametrize("name", ARCHITECTURES | MORE_ARCHITECTURES)
def test_parameters_are_what_files_hold(tmp_path: Path, name: str) -> None:
    save(name, tmp_path)
    source = open_source(tmp_path)
    assert dict(parameters(source.config)) == source.shapes


@pytest.mark.parametrize("kind", ["hf", "gguf", "awq"])
@pytest.mark.parametrize("load", [load_torch, load_native])
def test_an_engine_holds_what_was_planned(tmp_path: Path, kind: str, load: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    with torch_threads(1):
        model, path = save("llama", tmp_path, **sizes, tie_word_embeddings=kind == "gguf"), tmp_path
        if kind == "awq":
            quantize(model, tmp_path, "awq")
        if kind == "gguf":
            path = tmp_path / "model.gguf"
            write_gguf(model, path, type_name="Q4_1")
        check(load(path, kv_cache_bytes=2 << 20, block_size=16), path, LIMITS)


def check(engine: AnyEngine, path: Path, limits: Limits) -> None:
    plan = plan_cpu(outline(path), limits, "torch" if isinstance(engine, TorchEngine) else "native")
    assert (plan.num_blocks, plan.max_model_len) == (engine.info.num_blocks, engine.info.max_model_len)
    weight_bytes, pool_bytes = held_bytes(engine)
    assert plan.weight_bytes == pytest.approx(weight_bytes, rel=0.03)
    assert plan.pool_bytes == pytest.approx(pool_bytes, rel=0.03)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("load", [load_torch, load_native])
def test_the_default_model_takes_what_was_planned(load: Any) -> None:
    engine = load(model_path(), kv_cache_bytes=1 << 28, block_size=8)
    check(engine, model_path(), dataclasses.replace(LIMITS, block_size=8, kv_cache_bytes=1 << 28))


@pytest.mark.model
def test_the_command_counts_the_heads_that_a_worker_loads_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: str) -> dict[str, Any]:
        _, out, _ = run(capsys, str(model_path()), "--json", "--kv-cache-bytes", "256MiB", *args)
        plan: dict[str, Any] = json.loads(out)
        return plan

    default, torch_alone = planned(), planned("--engine", "torch")
    monkeypatch.setenv("HEADRACE_SPECULATIVE_CONFIG", "none")
    without = planned()
    heads = heads_of(WorkerSettings(speculative_config='{"method": "eagle3"}'), model_path(), Path())
    assert heads is not None and default["block_bytes"] == without["block_bytes"] + heads.block_bytes()
    assert 4 << 20 < default["weight_bytes"] - without["weight_bytes"] < 8 << 20
    assert default["num_blocks"] < without["num_blocks"] and default["step_bytes"] > without["step_bytes"]
    assert planned("--engine", "torch") == torch_alone


def test_a_folder_without_weights_is_enough(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    whole = plan_cpu(outline(tmp_path), LIMITS)
    names = list(model.state_dict())
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    (tmp_path / "model.safetensors").unlink()
    assert plan_cpu(outline(tmp_path), LIMITS) == whole
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, "1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert plan_cpu(outline(tmp_path), LIMITS) == whole


def write_70b(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return folder


class UntriedCard(MadeUpCard):
    """Where torch stands in for kernels, steps are computed in float32 alone."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        return self._step


KINDS = (
    "floats", "tied", "Q5_0", "int8", "fp8", "awq", "gptq-3", "gptq-act-order", "packed-8-channel", "int-quantized",
    "float-quantized", "fp8-block", "nf4", "experts", "latents",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "kv_cache_dtype"), [*((kind, "auto") for kind in KINDS), ("floats", "int8")])
def test_a_gpu_engine_holds_what_was_planned(tmp_path: Path, kind: str, kv_cache_dtype: str) -> None:
    """In float16, which takes what bfloat16 takes."""
    quantization, path = kind if kind in ("int8", "fp8") else "none", tmp_path
    with torch_threads(1):
        family = {"experts": "qwen2-moe", "latents": "deepseek3"}.get(kind, "llama")
        sizes = SIZES | (
            {"head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 0} if kind == "latents" else {}
        )
        model = save(family, tmp_path, **sizes, tie_word_embeddings=kind in ("tied", "Q5_0"))
        if kind == "Q5_0":
            write_gguf(model, path := tmp_path / "model.gguf", type_name=kind)
        elif kind not in ("floats", "tied", "experts", "latents", quantization):
            quantize(model, tmp_path, kind)
        total = 2 << 30
        limits = dataclasses.replace(LIMITS, kv_cache_bytes=None, kv_cache_dtype=kv_cache_dtype, memory_share=0.002)
        plan = plan_card(outline(path, quantization), limits, total)
        card = UntriedCard(total, total, taken=plan.weight_bytes, step=plan.step_bytes)
        engine = GpuEngine.load(
            path, torch.device("cpu"), dtype="float16", kv_cache_dtype=kv_cache_dtype, quantization=quantization,
            limits=StepLimits(limits.max_num_batched_tokens, limits.max_num_seqs, limits.memory_share), card=card,
        )  # fmt: skip
    assert (plan.num_blocks, plan.max_model_len) == (engine.info.num_blocks, engine.info.max_model_len)
    assert (plan.weight_bytes, plan.pool_bytes) == held_bytes(engine)
    asked = dataclasses.replace(limits, kv_cache_bytes=1 << 20)
    assert plan_card(outline(path, quantization), asked, total).num_blocks == (1 << 20) // plan.block_bytes


def test_a_model_of_70_billion_at_4_bits_fits_on_48_gb(tmp_path: Path) -> None:
    plan = plan_card(outline(write_70b(tmp_path)), CARD_LIMITS, 48 << 30)
    matrices = 80 * (8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    ends = 2 * 128256 * 8192
    assert plan.num_parameters == pytest.approx(matrices + ends, rel=1e-4)
    assert plan.weight_bytes == pytest.approx(matrices * (4 + 32 / 128) / 8 + ends * 2, rel=0.001)
    assert plan.kv_bytes_per_token == 80 * 8 * 128 * 2 * 2
    left = 0.9 * (48 << 30) - plan.weight_bytes - plan.step_bytes
    assert left - plan.block_bytes < plan.pool_bytes <= left
    assert plan.num_sequences(8192) == 2
    assert plan_card(outline(tmp_path), CARD_LIMITS, 24 << 30).num_blocks == 0
    smaller = dataclasses.replace(CARD_LIMITS, kv_cache_dtype="int8")
    assert plan_card(outline(tmp_path), smaller, 48 << 30).num_blocks > 1.9 * plan.num_blocks


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = command.main(args)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_counts_who_guesses_on_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tiny_gpu(tmp_path / "model")
    published("eagle3", tmp_path / "model", tmp_path / "head")
    save("llama", tmp_path / "draft", vocab_size=300)
    plans = []
    for text in ("none", f'{{"method": "eagle3", "model": "{tmp_path / "head"}"}}',
                 f'{{"method": "draft_model", "model": "{tmp_path / "draft"}"}}'):  # fmt: skip
        monkeypatch.setenv("HEADRACE_SPECULATIVE_CONFIG", text)
        status, out, _ = run(capsys, str(tmp_path / "model"), "--device", "4GiB", "--json")
        assert status == 0
        plans.append(json.loads(out))
    for key in ("weight_bytes", "step_bytes", "block_bytes"):
        assert min(plans[1][key], plans[2][key]) > plans[0][key]


def test_the_command_says_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "64")
    monkeypatch.setenv("HEADRACE_MAX_NUM_BATCHED_TOKENS", "512")
    model = str(write_70b(tmp_path))
    status, out, _ = run(capsys, model, "--device", "48GiB", "--context", "4096", "--concurrency", "4")
    assert status == 0 and "4 fit" in out and "327,680 bytes a token" in out
    status, out, _ = run(capsys, model, "--device", "a6000", "--context", "4096", "--concurrency", "6")
    assert status == 1 and "does not fit: 6 x 4,096 tokens need 7.50 GiB of KV" in out
    status, out, _ = run(capsys, model, "--device", "24GiB", "--json")
    assert status == 1 and json.loads(out)["fits"] is False
    status, out, _ = run(capsys, model, "--device", "h100", "--json")
    assert status == 0 and json.loads(out)["num_sequences"] > 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "gameboy"], "--device gameboy: neither cpu, nor a size like 48GiB, nor a known card"),
        (["--context", "9000"], "max_model_len: 9000, but the model's context is 8192"),
        (["--device", "h100", "--kv-cache-dtype", "int2"], "kv_cache_dtype"),
        (["--kv-cache-bytes", "1000"], "kv_cache_bytes: not one block"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    status, out, err = run(capsys, str(write_70b(tmp_path)), *args)
    assert (status, out) == (1, "") and message in err


def test_what_the_worker_refuses_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = LLAMA_70B | {"quantization_config": {"quant_method": "aqlm"}}
    (write_70b(tmp_path) / "config.json").write_text(json.dumps(changed))
    status, _, err = run(capsys, str(tmp_path), "--device", "h100")
    assert status == 1 and "quantization_config.quant_method: 'aqlm' is not supported" in err
