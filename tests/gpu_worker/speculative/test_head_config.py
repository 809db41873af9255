"""Published configurations of heads: understood, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.model.config import ConfigError, LayerKind, ModelConfig
from services.gpu_worker.speculative.head_config import (
    MedusaConfig,
    eagle_like,
    eagle_values,
    medusa_values,
    read_eagle,
    read_medusa,
)

TARGET = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, norm_eps=1e-5, max_position_embeddings=131072, layers=(LayerKind(),) * 32,
)  # fmt: skip
# As SafeAILab/EAGLE and FasterDecoding/Medusa publish them.
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 2048,
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 128256, "draft_vocab_size": 32000,
}  # fmt: skip
EAGLE = {key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"} | {"bias": True}
MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/model",
          "transformers_version": "4.34.0"}  # fmt: skip
VLLM_MEDUSA = {
    "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 4096, "vocab_size": 128256,
    "num_heads": 4, "num_hidden_layers": 1, "truncated_vocab_size": 32000, "max_paths": 64, "topk": 10,
    "original_lm_head": False, "medusa_fc_bias": True,
}  # fmt: skip


def test_published_eagle3() -> None:
    config = read_eagle(EAGLE3, "eagle3", TARGET)
    assert (config.draft_vocab_size, config.tap_layers, config.norms_first) == (32000, (2, 16, 29), False)
    assert (config.layer.num_layers, config.layer.head_dim, config.layer.rope.theta) == (1, 128, 10000.0)
    changed = EAGLE3 | {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 32], "use_aux_hidden_state": True},
        "norm_before_residual": True, "target_hidden_size": 4096, "architectures": ["LlamaForCausalLMEagle3"],
    }  # fmt: skip
    config = read_eagle(changed, "eagle3", TARGET)
    assert (config.tap_layers, config.norms_first) == ((1, 15, 32), True)


def test_published_eagle() -> None:
    config = read_eagle(EAGLE, "eagle", TARGET)
    assert (config.draft_vocab_size, config.tap_layers, config.fc_bias) == (128256, (33,), True)


@pytest.mark.parametrize(
    "config, heads, vocab, bias", [(MEDUSA, 3, 128256, True), (VLLM_MEDUSA, 4, 32000, True),
                                   ({**VLLM_MEDUSA, "medusa_fc_bias": None}, 4, 32000, False)]
)  # fmt: skip
def test_published_medusa(config: dict[str, Any], heads: int, vocab: int, bias: bool) -> None:
    found = read_medusa(config, TARGET)
    assert (found.num_heads, found.draft_vocab_size, found.block_bias) == (heads, vocab, bias)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_what_is_written_is_read(kind: str) -> None:
    config = eagle_like("eagle3" if kind == "eagle3" else "eagle", TARGET, 32000)
    assert read_eagle(eagle_values(config), config.kind, TARGET) == config
    medusa = MedusaConfig(4096, 128256, 32000, 3, (33,))
    assert read_medusa(medusa_values(medusa), TARGET) == medusa


@pytest.mark.parametrize(
    "change, named",
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_size": 2048}, "hidden_size"),
        ({"vocab_size": 32000}, "vocab_size"),
        ({"draft_vocab_size": 200000}, "draft_vocab_size"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"target_hidden_size": 8192}, "target_hidden_size"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 99]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"tree": 1}}, "eagle_config.tree"),
        ({"architectures": ["MedusaModel"]}, "architectures"),
        ({"architectures": 7}, "architectures"),
        ({"bias": True}, "bias"),
    ],
)
def test_eagle3_that_is_not_understood_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_eagle(EAGLE3 | change, "eagle3", TARGET)


def test_a_head_of_the_other_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab_size.*EAGLE-3"):
        read_eagle(EAGLE3, "eagle", TARGET)
    with pytest.raises(ConfigError, match="architectures"):
        read_medusa(EAGLE3, TARGET)


@pytest.mark.parametrize(
    "change, named",
    [({"num_heads": 0}, "num_heads"), ({"hidden_size": 64}, "hidden_size"), ({"truncated_vocab_size": 0}, "truncated"),
     ({"logit_scale": 2.0}, "logit_scale"), ({"shared_blocks": True}, "shared_blocks")],
)  # fmt: skip
def test_medusa_that_is_not_understood_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_medusa(VLLM_MEDUSA | change, TARGET)
