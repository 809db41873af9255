"""What only DeepSeek's configurations say: latent attention, and experts that are chosen by groups. *Pure.*"""

from __future__ import annotations

from typing import Any

from services.gpu_worker.model.config import ConfigError, ExpertConfig, LatentConfig
from services.gpu_worker.model.hf_rope import FamilyKeys, yarn_scale

GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


def read_latent(keys: FamilyKeys) -> LatentConfig | None:
    if "kv_lora_rank" not in keys.family.reads:
        return None
    latent = LatentConfig(
        rank=keys.need("kv_lora_rank", int),
        rope_dim=keys.need("qk_rope_head_dim", int),
        nope_dim=keys.need("qk_nope_head_dim", int),
        value_dim=keys.need("v_head_dim", int),
        q_rank=keys.take("q_lora_rank", int, 0),
        in_pairs=keys.own("rope_interleave", bool, True),
    )
    keys.expect("head_dim", latent.rope_dim, latent.nope_dim + latent.rope_dim)
    keys.expect("qk_head_dim", latent.nope_dim + latent.rope_dim)
    return latent


def latent_scale(latent: LatentConfig, values: dict[str, Any]) -> float:
    """Of scores; yarn's second factor is for them."""
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    sharper = 1.0
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        sharper = yarn_scale(float(rope.get("factor", 1.0)), float(rope["mscale_all_dim"]))
    return float((latent.nope_dim + latent.rope_dim) ** -0.5 * sharper * sharper)


def sparse_from(keys: FamilyKeys, num_layers: int) -> list[bool]:
    first = keys.own("first_k_dense_replace", int, 0)
    return [i >= first for i in range(num_layers)]


def read_experts(keys: FamilyKeys) -> ExpertConfig:
    by_sigmoid = keys.family.scoring == "sigmoid"
    method = keys.own("topk_method", str, IN_GROUPS)
    if method not in (GREEDY, IN_GROUPS):
        raise ConfigError(f"topk_method: {method!r} is not supported (known: {GREEDY}, {IN_GROUPS})")
    groups, used_groups = keys.own("n_group", int, 1), keys.own("topk_group", int, 1)
    if method == GREEDY:
        groups = used_groups = 1
    renormalize = keys.own("norm_topk_prob", bool, by_sigmoid)
    if renormalize and not by_sigmoid:
        raise ConfigError("norm_topk_prob: true is not supported with scores by softmax")
    size = keys.need("moe_intermediate_size", int)
    return ExpertConfig(
        num_experts=keys.need("n_routed_experts", int),
        num_used=keys.need("num_experts_per_tok", int),
        intermediate_size=size,
        scoring=keys.family.scoring,
        renormalize=renormalize,
        scale=keys.own("routed_scaling_factor", float, 1.0),
        choice_bias=by_sigmoid,
        num_groups=groups,
        num_used_groups=used_groups,
        group_score="top2" if by_sigmoid else "max",
        shared_size=keys.own("n_shared_experts", int, 0) * size,
    )
