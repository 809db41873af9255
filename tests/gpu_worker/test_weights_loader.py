"""Loading: both formats, all storage types, and every way a checkpoint can contradict its configuration."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kernels.matmul_dense import matmul_dense
from services.gpu_worker.model.layers import DecoderWeights, FeedForwardWeights, FloatTable, Linear
from services.gpu_worker.weights.loader import load_weights, open_source
from services.gpu_worker.weights.source import WeightsError
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import build, save

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 96, "vocab_size": 70}  # fmt: skip


def load(path: Path) -> DecoderWeights:
    return load_weights(open_source(path))


def dense(linear: Linear) -> torch.Tensor:
    """The matrix that a packed weight multiplies with."""
    identity = torch.eye(linear.weight.in_features)
    return matmul_dense(identity, linear.weight).t()


def assert_equal_to(weights: DecoderWeights, state: dict[str, torch.Tensor]) -> None:
    assert isinstance(weights.embedding, FloatTable)
    assert torch.equal(weights.embedding.tensor, state["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm.weight, state["model.norm.weight"])
    for i, layer in enumerate(weights.layers):
        assert isinstance(layer.ffn, FeedForwardWeights)
        prefix = f"model.layers.{i}."
        qkv = torch.cat([state[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
        assert torch.equal(dense(layer.qkv), qkv)
        gate_up = torch.cat([state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(dense(layer.ffn.into), gate_up)
        assert torch.equal(dense(layer.out), state[f"{prefix}self_attn.o_proj.weight"])
        assert torch.equal(dense(layer.ffn.down), state[f"{prefix}mlp.down_proj.weight"])
        assert layer.attn_norm is not None and layer.ffn_norm is not None
        assert torch.equal(layer.attn_norm.weight, state[f"{prefix}input_layernorm.weight"])
        assert torch.equal(layer.ffn_norm.weight, state[f"{prefix}post_attention_layernorm.weight"])


def test_both_formats_load_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("llama", tmp_path / "hf", **SMALL)
    write_gguf(model, tmp_path / "model.gguf")
    # Memory that is allocated and not written would show.
    monkeypatch.setattr(torch, "empty", lambda *size: torch.full(size, torch.nan))
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        weights = load(path)
        assert_equal_to(weights, model.state_dict())
        assert torch.equal(dense(weights.head), model.lm_head.weight)


def test_biases_and_norms(tmp_path: Path) -> None:
    for name, arch, changes in (("qwen2", "qwen2", {}), ("qwen3", "qwen3", {}), ("llama-biases", "llama", {})):
        model = save(name, tmp_path / name, **changes)
        write_gguf(model, tmp_path / f"{name}.gguf", arch)
        state = model.state_dict()
        for path in (tmp_path / name, tmp_path / f"{name}.gguf"):
            layer = load(path).layers[1]
            attn = "model.layers.1.self_attn."
            if name != "qwen3":
                bias = torch.cat([state[f"{attn}{p}_proj.bias"] for p in "qkv"])
                assert layer.qkv.bias is not None and torch.equal(layer.qkv.bias, bias)
            if name == "qwen3":
                assert layer.k_norm is not None and torch.equal(layer.k_norm.weight, state[f"{attn}k_norm.weight"])
            if name == "llama-biases":
                assert isinstance(layer.ffn, FeedForwardWeights) and layer.ffn.down.bias is not None
                assert torch.equal(layer.ffn.down.bias, state["model.layers.1.mlp.down_proj.bias"])


@pytest.mark.parametrize(
    ("type_name", "tolerance"),
    [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 0.01), ("Q5_1", 0.06), ("Q5_0", 0.08), ("Q4_1", 0.12), ("Q4_0", 0.15)],
)
def test_weight_files_quantised_gguf_types(tmp_path: Path, type_name: str, tolerance: float) -> None:
    model = build("llama", **SMALL)
    write_gguf(model, tmp_path / "model.gguf", type_name=type_name)
    weights, state = load(tmp_path / "model.gguf"), model.state_dict()
    assert isinstance(weights.embedding, FloatTable)
    assert (weights.embedding.tensor - state["model.embed_tokens.weight"]).abs().max() < tolerance
    q = torch.cat([state[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert (dense(weights.layers[1].qkv) - q).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_safetensors_types(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build("llama", **SMALL).to(dtype)
    model.save_pretrained(tmp_path)
    assert_equal_to(load(tmp_path), {name: tensor.float() for name, tensor in model.state_dict().items()})


def test_large_tensors_are_read_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("llama", tmp_path / "hf", **SMALL)
    write_gguf(model, tmp_path / "model.gguf")
    for module in ("gguf", "safetensors"):
        monkeypatch.setattr(f"services.gpu_worker.weights.{module}.CHUNK_BYTES", 1000)
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        assert_equal_to(load(path), model.state_dict())


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    save("llama-tied", tmp_path)
    seen: list[tuple[int, int]] = []
    load_weights(open_source(tmp_path), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


# --- tied embeddings: the configuration says one thing, the checkpoint has another ------------------------------------


def hf_variant(folder: Path, tied: bool | None, head: str) -> torch.Tensor:
    """A folder with this configuration and an output head that differs, is equal or absent; the embedding."""
    model = save("llama", folder, **SMALL)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = tied
    if tied is None:
        del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    if head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif head == "absent":
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return model.state_dict()["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("tied", "head", "warns"),
    [
        (True, "differs", True),
        (True, "equal", False),
        (True, "absent", False),
        (False, "differs", False),
        (False, "absent", True),
        (None, "differs", False),
        (None, "absent", False),
    ],
)
def test_weight_files_config_the_checkpoint_decides_about_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tied: bool | None, head: str, warns: bool
) -> None:
    embedding = hf_variant(tmp_path, tied, head)
    with caplog.at_level(logging.WARNING):
        weights = load(tmp_path)
    assert torch.equal(dense(weights.head), embedding) == (head != "differs")
    assert bool(caplog.records) == warns
    if warns:
        assert "tie_word_embeddings" in caplog.text


@pytest.mark.parametrize("head", ["differs", "absent"])
def test_weight_files_config_a_gguf_file_with_and_without_a_head(tmp_path: Path, head: str) -> None:
    model = build("llama", **SMALL)
    changes: dict[str, torch.Tensor | None] = {} if head == "differs" else {"lm_head.weight": None}
    write_gguf(model, tmp_path / "model.gguf", changes=changes)
    want = model.lm_head.weight if head == "differs" else model.model.embed_tokens.weight
    assert torch.equal(dense(load(tmp_path / "model.gguf").head), want)


# --- what must not load ----------------------------------------------------------------------------------------------


def edited(folder: Path, **changes: Any) -> Path:
    """The folder's tensors with some replaced, or dropped with None."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def test_tensors_that_contradict_the_configuration(tmp_path: Path) -> None:
    save("llama", tmp_path / "good", **SMALL)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model.norm.weight": None}, "model.norm.weight.*found None"),
        ({"model.norm.weight": torch.ones(63)}, r"model.norm.weight.*\(64,\) expected, found \(63,\)"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 64)}, "k_proj"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "1 tensors have no place.*q_proj.bias"),
        ({"model.layers.7.input_layernorm.weight": torch.ones(64)}, "no place"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "model.norm.weight.*I8 is not supported"),
    ]
    for i, (changes, message) in enumerate(cases):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "good", folder)
        edited(folder, **changes)
        with pytest.raises(WeightsError, match=message):
            load(folder)
    edited(tmp_path / "good", **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(tmp_path / "good")


def test_an_unknown_gguf_tensor_or_type_is_refused(tmp_path: Path) -> None:
    model = build("llama", **SMALL)
    write_gguf(model, tmp_path / "extra.gguf", changes={"surprise": torch.ones(4)})
    with pytest.raises(WeightsError, match="no place.*surprise"):
        load(tmp_path / "extra.gguf")
    write_gguf(model, tmp_path / "tq.gguf", type_name="MXFP4")
    with pytest.raises(WeightsError, match="MXFP4 is not supported"):
        load(tmp_path / "tq.gguf")


def test_sharded_folders(tmp_path: Path) -> None:
    model = build("llama", **SMALL)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equal_to(load(tmp_path), model.state_dict())
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = min(good["weight_map"].values())
    for name, message in (
        ("../outside.safetensors", "not the name of a file"),
        ("/etc/model.safetensors", "not the name of a file"),
        ("model-00009-of-00009.safetensors", "is missing"),
    ):
        index.write_text(json.dumps({"weight_map": good["weight_map"] | {"model.norm.weight": name}}))
        with pytest.raises(WeightsError, match=message):
            load(tmp_path)
    index.write_text(json.dumps(good))
    shutil.copy(tmp_path / first, tmp_path / "copy.safetensors")
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"x": "copy.safetensors"}}))
    with pytest.raises(WeightsError, match="in another file too"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("config.json", b"{", "config.json"),
        ("config.json", b"[]", "not an object"),
        ("config.json", b'{"a":' * 100_000, "config.json"),
        ("model.safetensors", b"\xff" * 100, "model.safetensors"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "found None"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    save("llama", tmp_path, **SMALL)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save("llama", folder, **SMALL)
    return folder


HEADERS: list[Any] = [
    {"shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}, {"shape": [-1, 4], "data_offsets": [0, 16]},
    {"shape": [4], "data_offsets": [0, 1 << 62]}, {"shape": [4], "data_offsets": [16, 0]},
    {"shape": [4], "data_offsets": [8, 24]}, {"shape": [0, 4], "data_offsets": [0, 0]}, {"shape": [4]},
    {"shape": [4], "data_offsets": [0, 16], "dtype": "F99"}, {"shape": "x", "data_offsets": [0, 16]}, [], 7,
]  # fmt: skip


@pytest.mark.parametrize("fields", HEADERS, ids=str)
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, small_folder: Path, fields: Any) -> None:
    shutil.copytree(small_folder, tmp_path / "m")
    tensor = {"dtype": "F32"} | fields if isinstance(fields, dict) else fields
    header = json.dumps({"model.norm.weight": tensor}).encode()
    (tmp_path / "m" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(WeightsError):
        load(tmp_path / "m")


@pytest.mark.parametrize("size", [0, 1, 99, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_safetensors_header_is_no_longer_than_its_file(tmp_path: Path, small_folder: Path, size: int) -> None:
    shutil.copytree(small_folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}" + b" " * 50)
    with pytest.raises(WeightsError):
        load(tmp_path / "m")


@given(at=st.integers(0, 600), value=st.integers(0, 255), cut=st.integers(0, 50))
@settings(max_examples=40)
def test_no_damage_of_a_safetensors_file_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, small_folder: Path, at: int, value: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "config.json").write_bytes((small_folder / "config.json").read_bytes())
    data = bytearray((small_folder / "model.safetensors").read_bytes())
    data[at % len(data)] = value
    (folder / "model.safetensors").write_bytes(bytes(data[: len(data) - cut]))
    with contextlib.suppress(WeightsError):
        load(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file"):
        open_source(tmp_path / "nothing")
    with pytest.raises(WeightsError, match=r"config\.json"):
        open_source(tmp_path)
    save("llama", tmp_path, **SMALL)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        open_source(tmp_path)


def test_identity_follows_the_bytes(tmp_path: Path) -> None:
    """Equal for copies; different for a fine-tune of the same shapes and sizes."""
    save("llama", tmp_path / "a", **SMALL)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert open_source(tmp_path / "a").identity == open_source(tmp_path / "b").identity
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    edited(tmp_path / "b", **{name: tensor + 0.5 for name, tensor in tensors.items()})
    assert open_source(tmp_path / "a").identity != open_source(tmp_path / "b").identity
    for seed in (0, 1):
        write_gguf(build("llama", seed, **SMALL), tmp_path / f"{seed}.gguf")
    assert open_source(tmp_path / "0.gguf").identity != open_source(tmp_path / "1.gguf").identity
