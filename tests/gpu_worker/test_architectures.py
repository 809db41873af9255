"""Every architecture against transformers: logits after prompts in chunks and along 32 decoding steps, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.any_engine import load_torch, logits_along
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import MORE_ARCHITECTURES, VOCAB_SIZE, YARN, prompts, save
from tests.kernels.threads import torch_threads

NUM_DECODED = 32
NUM_PROMPT = [3, 41, 70]  # beyond the windows, and beyond a tile of attention
LONG_PROMPT = [33, 41, 70]  # beyond longrope's shorter context, where transformers too uses the longer one's factors


@pytest.mark.parametrize("name", MORE_ARCHITECTURES)  # the others are in test_engine_reference.py
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    num_prompt = LONG_PROMPT if "longrope" in name else NUM_PROMPT
    with torch_threads(1):
        model = save(name, tmp_path)
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randint(0, VOCAB_SIZE, (n + NUM_DECODED,), generator=generator) for n in num_prompt]
        got = logits_along(load_torch(tmp_path, kv_cache_bytes=8 << 20), [t.tolist() for t in texts], num_prompt)
        for text, first, mine in zip(texts, num_prompt, got, strict=True):
            with torch.no_grad():
                want = model(text[None]).logits[0, first - 1 :]
            assert want.std() > 0.1
            torch.testing.assert_close(mine, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["gemma2", "mixtral", "qwen2-moe", "starcoder2-window", "olmo3", "deepseek2", "deepseek3"]
)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_sequence_alone_has_the_same_bits(tmp_path: Path, name: str, kv_cache_dtype: str) -> None:
    with torch_threads(1):
        save(name, tmp_path)
        engine = load_torch(tmp_path, kv_cache_bytes=8 << 20, kv_cache_dtype=kv_cache_dtype)
        texts = [text + text[:3] for text in prompts(4, low=20, high=90)]
        num_prompt = [len(text) - 3 for text in texts]
        together = logits_along(engine, texts, num_prompt)
        for text, count, want in zip(texts, num_prompt, together, strict=True):
            assert torch.equal(logits_along(engine, [text], [count], chunk=32)[0], want)


def test_a_latent_is_kept_once(tmp_path: Path) -> None:
    """A token has one row for all heads, in eight bits too; layers that foresee further tokens are left out."""
    with torch_threads(1):
        model = save("deepseek3", tmp_path, first_k_dense_replace=3)  # experts would be others in eight bits
        tensors = load_file(tmp_path / "model.safetensors")
        copies = {
            name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in tensors.items() if ".2." in name
        }
        save_file(tensors | copies, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        engines = [load_torch(tmp_path, kv_cache_bytes=1 << 20, kv_cache_dtype=name) for name in ("auto", "int8")]
        text = prompts(1, low=60, high=61)[0]
        want, got = (logits_along(engine, [text], [len(text)]) for engine in engines)
        with torch.no_grad():
            torch.testing.assert_close(want[0], model(torch.tensor([text])).logits[0, -1:], atol=1e-4, rtol=1e-5)
    assert engines[0].info.num_blocks == (1 << 20) // (3 * 16 * (24 + 8) * 4)
    assert 0 < (got - want).std() / want.std() < 0.1


GGUF_PATTERNS = {"num_hidden_layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16}
GGUF = {  # the file's name of the architecture, and what llama.cpp takes for granted
    "llama-yarn": ("llama", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "granite-tied": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "phi3-window": ("phi3", {}),
    "phi3-longrope": ("phi3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", GGUF_PATTERNS),
    "gemma3-linear": ("gemma3", GGUF_PATTERNS),
    "stablelm-bias": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "mixtral": ("llama", {}),
    "qwen2-moe": ("qwen2moe", {}),
    "qwen3-moe": ("qwen3moe", {"mlp_only_layers": []}),
    "deepseek2": ("deepseek2", {}),
    "deepseek2-groups": ("deepseek2", {}),
    "deepseek3": ("deepseek2", {}),
    "deepseek3-yarn": (
        "deepseek2",
        {"rope_interleave": True, "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}},
    ),
}


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_computes_the_same(tmp_path: Path, name: str) -> None:
    arch, changes = GGUF[name]
    with torch_threads(1):
        write_gguf(save(name, tmp_path / "hf", **changes), tmp_path / "model.gguf", arch)
        texts = [text + text[:3] for text in prompts(2, low=33, high=90)]
        want, got = (
            logits_along(load_torch(tmp_path / file, kv_cache_bytes=8 << 20), texts, [len(t) - 3 for t in texts])
            for file in ("hf", "model.gguf")
        )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_up_projections_may_lie_apart(tmp_path: Path) -> None:
    """As newer files of DeepSeek's models have them, with the sizes of the one head in the cache."""
    with torch_threads(1):
        model = save("deepseek3", tmp_path / "hf")
        config = model.config
        parts: dict[str, torch.Tensor | None] = {}
        for i, layer in enumerate(model.model.layers):
            up = layer.self_attn.kv_b_proj.weight.detach().view(config.num_attention_heads, -1, config.kv_lora_rank)
            parts[f"model.layers.{i}.self_attn.kv_b_proj.weight"] = None
            parts[f"blk.{i}.attn_k_b.weight"] = up[:, : config.qk_nope_head_dim].transpose(1, 2).contiguous()
            parts[f"blk.{i}.attn_v_b.weight"] = up[:, config.qk_nope_head_dim :].contiguous()
        write_gguf(model, tmp_path / "model.gguf", "deepseek2", changes=parts, apart=True)
        texts = prompts(2, low=33, high=60)
        want, got = (
            logits_along(load_torch(tmp_path / file, kv_cache_bytes=8 << 20), texts, [len(t) for t in texts])
            for file in ("hf", "model.gguf")
        )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
