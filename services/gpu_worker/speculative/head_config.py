"""What a head that drafts is, from the config.json of a published checkpoint, and back. *Pure.*

EAGLE-1 and -2 (which differ in how trees are drawn, not in the head) and EAGLE-3: keys as in SafeAILab/EAGLE
(`eagle/traineagle3/config.json`) and as vLLM reads them (`llama_eagle.py`, `llama_eagle3.py`). Medusa: as vLLM has it
(`transformers_utils/configs/medusa.py`), and as FasterDecoding/Medusa does (`medusa_num_heads`). A key that changes the
computation is understood or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from services.gpu_worker.model.config import ConfigError, Keys, LayerKind, ModelConfig, RopeConfig
from services.gpu_worker.model.families import HF_FAMILIES
from services.gpu_worker.model.hf_config import config_from_hf
from services.gpu_worker.model.hf_values import hf_values

LLAMA = "LlamaForCausalLM"
EAGLE_NAMES = (LLAMA, "EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "Eagle3LlamaForCausalLM",
               "LlamaForCausalLMEagle3")  # fmt: skip
MEDUSA_NAMES = ("MedusaModel",)
# Of trees and of training, and of what the target is: they say nothing about a head's numbers.
_INERT = frozenset({"architectures", "model_type", "max_paths", "topk", "max_seq_len", "torch_dtype", "dtype",
                    "transformers_version", "base_model_name_or_path", "version"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """layer: the one that it has; its vocabulary is the target's. tap_layers: of which layers of the target it reads
    the input, see `Decoder.hidden_rows`. norms_first: the residual stream begins behind the norm."""

    kind: Literal["eagle", "eagle3"]
    layer: ModelConfig
    draft_vocab_size: int
    tap_layers: tuple[int, ...]
    fc_bias: bool = False
    norms_first: bool = False

    @property
    def is_fused(self) -> bool:
        """EAGLE-3: reads several layers of the target, embedding and row side by side, and has an output head."""
        return self.kind == "eagle3"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """num_blocks: residual blocks of a head. has_shared_head: one output head serves all."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    tap_layers: tuple[int, ...]
    num_blocks: int = 1
    block_bias: bool = True
    has_shared_head: bool = False


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads where its configuration does not say."""
    return 2, num_layers // 2, num_layers - 3


def last_layer(num_layers: int) -> tuple[int, ...]:
    """What the output head reads, which EAGLE-1 and Medusa do too."""
    return (num_layers + 1,)


def eagle_like(kind: Literal["eagle", "eagle3"], target: ModelConfig, draft_vocab_size: int) -> EagleConfig:
    """A new head with a layer as large as one of the target's."""
    layer = ModelConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=target.intermediate_size,
        num_layers=1, num_heads=target.num_heads, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
        norm_eps=target.norm_eps, max_position_embeddings=target.max_position_embeddings, layers=(LayerKind(),),
        rope=RopeConfig(theta=target.rope.theta), tied=False,
    )  # fmt: skip
    if kind == "eagle3":
        return EagleConfig(kind, layer, draft_vocab_size, fused_layers(target.num_layers))
    return EagleConfig(kind, layer, target.vocab_size, last_layer(target.num_layers))


def read_eagle(values: Mapping[str, Any], kind: Literal["eagle", "eagle3"], target: ModelConfig) -> EagleConfig:
    """ConfigError names the key that is wrong, not supported, or does not fit the target."""
    own = Keys(values, "")
    _check_name(values, EAGLE_NAMES)
    draft_vocab_size = own.take("draft_vocab_size", int, target.vocab_size)
    fc_bias, norms_first = own.take("bias", bool, False), own.take("norm_before_residual", bool, False)
    own.expect("target_hidden_size", target.hidden_size)
    own.expect("use_aux_hidden_state", True)
    tap_layers = fused_layers(target.num_layers) if kind == "eagle3" else last_layer(target.num_layers)
    eagle = Keys(own.take("eagle_config", dict, {}), "eagle_config.")
    eagle.expect("use_aux_hidden_state", True)
    if eagle.is_list("eagle_aux_hidden_state_layer_ids"):
        tap_layers = tuple(int(layer) for layer in eagle.numbers("eagle_aux_hidden_state_layer_ids"))
    eagle.finish(frozenset())
    taken = ("draft_vocab_size", "bias", "norm_before_residual", "target_hidden_size", "eagle_config",
             "use_aux_hidden_state")  # fmt: skip
    rest = {key: value for key, value in values.items() if key not in taken}
    layer = config_from_hf({**rest, "architectures": [LLAMA]})
    config = EagleConfig(kind, layer, draft_vocab_size, tap_layers, fc_bias, norms_first)
    _check_eagle(config, target)
    return config


def _check_eagle(config: EagleConfig, target: ModelConfig) -> None:
    layer = config.layer
    if layer.num_layers != 1:
        raise ConfigError(f"num_hidden_layers: {layer.num_layers} in a head; one is supported")
    for key in ("hidden_size", "vocab_size"):
        if getattr(layer, key) != getattr(target, key):
            raise ConfigError(f"{key}: {getattr(layer, key)} in the head, {getattr(target, key)} in the model")
    if config.kind == "eagle" and config.draft_vocab_size != target.vocab_size:
        raise ConfigError("draft_vocab_size: a head of EAGLE-1 uses the model's output head; is this one of EAGLE-3?")
    if config.kind == "eagle3" and config.fc_bias:
        raise ConfigError("bias: True is not supported in a head of EAGLE-3")
    if config.kind == "eagle" and config.norms_first:
        raise ConfigError("norm_before_residual: True is not supported in a head of EAGLE-1")
    if not 1 <= config.draft_vocab_size <= target.vocab_size:
        raise ConfigError(f"draft_vocab_size: {config.draft_vocab_size} of {target.vocab_size} tokens")
    if not config.tap_layers or not all(0 <= layer <= target.num_layers + 1 for layer in config.tap_layers):
        raise ConfigError(f"eagle_aux_hidden_state_layer_ids: {list(config.tap_layers)} of {target.num_layers} layers")


def read_medusa(values: Mapping[str, Any], target: ModelConfig) -> MedusaConfig:
    """As `read_eagle`; num_heads and medusa_num_heads are two names for one, and so are the numbers of blocks."""
    keys = Keys(values, "")
    if "architectures" in values:
        _check_name(values, MEDUSA_NAMES)
    num_heads = keys.take("num_heads", int, keys.take("medusa_num_heads", int, 5))
    num_blocks = keys.take("num_hidden_layers", int, keys.take("medusa_num_layers", int, 1))
    is_vllms = "num_heads" in values
    hidden_size = keys.take("hidden_size", int, target.hidden_size)
    vocab_size = keys.take("vocab_size", int, target.vocab_size)
    config = MedusaConfig(
        hidden_size, vocab_size, keys.take("truncated_vocab_size", int, vocab_size), num_heads,
        last_layer(target.num_layers), num_blocks, keys.take("medusa_fc_bias", bool, not is_vllms),
        keys.take("original_lm_head", bool, False),
    )  # fmt: skip
    keys.expect("logit_scale", 1.0)
    keys.finish(_INERT)
    if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        raise ConfigError(
            f"hidden_size {hidden_size} and vocab_size {vocab_size} of the heads are not the model's "
            f"({target.hidden_size}, {target.vocab_size})"
        )
    if not (1 <= num_heads <= 64 and 0 <= num_blocks <= 16 and 1 <= config.draft_vocab_size <= vocab_size):
        raise ConfigError("num_heads, num_hidden_layers or truncated_vocab_size is out of range")
    return config


def _check_name(values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in known:
        raise ConfigError(f"architectures: {name} is not a head that is supported (known: {', '.join(known)})")


def eagle_values(config: EagleConfig) -> dict[str, Any]:
    """Its config.json."""
    values = hf_values(config.layer, HF_FAMILIES[LLAMA], "float16")
    if config.kind == "eagle":
        return {**values, "bias": config.fc_bias}
    return {
        **values, "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"use_aux_hidden_state": True,
                         "eagle_aux_hidden_state_layer_ids": list(config.tap_layers)},
    }  # fmt: skip


def medusa_values(config: MedusaConfig) -> dict[str, Any]:
    return {
        "architectures": list(MEDUSA_NAMES), "model_type": "medusa", "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size, "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads, "num_hidden_layers": config.num_blocks, "medusa_fc_bias": config.block_bias,
        "original_lm_head": config.has_shared_head,
    }  # fmt: skip


def drafting_layer(config: EagleConfig) -> ModelConfig:
    """The layer as a decoder whose output head has the draft vocabulary."""
    return replace(config.layer, vocab_size=config.draft_vocab_size)
