"""Which tensor of a file belongs where in the decoder: places have one name, files call them many. *Pure.*

A place is `embedding`, `final_norm`, `head`, or `layers.I.` with a name of `families.LLAMA_NAMES`; `.weight` or
`.bias` follows. A tensor may hold the rows of several places, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.families import Family
from services.gpu_worker.weights.source import WeightsError

HF_TOP = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
GGUF_TOP = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "out": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "ffn_post_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_inp_shexp",
    "shared.gate": "ffn_gate_shexp",
    "shared.up": "ffn_up_shexp",
    "shared.down": "ffn_down_shexp",
}
GGUF_FUSED = {
    "ffn_gate_exps": ("experts.{}.gate",),
    "ffn_up_exps": ("experts.{}.up",),
    "ffn_down_exps": ("experts.{}.down",),
}
NORMS = ("attn_norm", "q_norm", "k_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm", "final_norm")

_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,5})(?=\.)")
_MAX_RANK = 3


class Names:
    def __init__(
        self, top: Mapping[str, str], prefix: str, layer: Mapping[str, str], fused: Mapping[str, tuple[str, ...]],
        num_experts: int,
    ) -> None:  # fmt: skip
        """fused: places with {} stand for all experts in turn."""
        self._prefix = prefix
        self._num_experts = num_experts
        self._names = {**layer, **{place: name for name, places in fused.items() for place in places}}
        self._places = {**{name: (place,) for place, name in layer.items()}, **fused}
        self._top_names = dict(top)
        self._top_places = {name: place for place, name in top.items()}

    def places(self, name: str) -> tuple[str, ...]:
        """Where the tensor's rows go; none if it has no place."""
        stem, _, kind = name.rpartition(".")
        if kind.endswith("_bias"):  # a name of its own
            stem, kind = name, "bias"
        if stem in self._top_places:
            return (f"{self._top_places[stem]}.{kind}",)
        match = re.match(re.escape(self._prefix) + r"(0|[1-9][0-9]{0,5})\.(.+)", stem)
        if match is None:
            return ()
        layer, rest = match.groups()
        if rest in self._places:
            number = None
        else:
            rest, number = _numbered(rest)
        if rest not in self._places:
            return ()
        return tuple(f"layers.{layer}.{place}.{kind}" for place in self._expanded(self._places[rest], number))

    def _expanded(self, places: tuple[str, ...], number: str | None) -> Iterator[str]:
        if number is None and any("{}" in place for place in places):
            yield from (place.format(e) for e in range(self._num_experts) for place in places)
        else:
            yield from (place.format(number) for place in places)

    def name(self, place: str) -> str:
        """What the file would call the tensor that this place's rows are in."""
        stem, _, kind = place.rpartition(".")
        if stem in self._top_names:
            return f"{self._top_names[stem]}.{kind}"
        _, layer, rest = stem.split(".", 2)
        rest, number = (rest, None) if rest in self._names else _numbered(rest)
        found = f"{self._prefix}{layer}.{self._names.get(rest, rest).format(number)}"
        return found if found.endswith("_bias") else f"{found}.{kind}"


def _numbered(rest: str) -> tuple[str, str | None]:
    """experts.7.up -> experts.{}.up and 7."""
    match = _NUMBER.search(rest)
    return (rest, None) if match is None else (f"{rest[: match.start()]}{{}}{rest[match.end() :]}", match.group())


def hf_names(family: Family, config: ModelConfig) -> Names:
    return Names(HF_TOP, "model.layers.", family.names, family.fused, _num_experts(config))


def gguf_names(family: Family, config: ModelConfig) -> Names:
    fused_places = {place for places in family.gguf_fused.values() for place in places}
    named = {**GGUF_LAYER, **family.gguf_names}
    layer = {place: name for place, name in named.items() if place not in fused_places}
    return Names(GGUF_TOP, "blk.", layer, {**family.gguf_fused, **GGUF_FUSED}, _num_experts(config))


def _num_experts(config: ModelConfig) -> int:
    return 0 if config.experts is None else config.experts.num_experts


def is_place(name: str) -> bool:
    return name.startswith("layers.") or name.partition(".")[0] in HF_TOP


def is_norm(place: str) -> bool:
    return place.endswith(".weight") and place.split(".")[-2] in NORMS


def has_bias(place: str, config: ModelConfig) -> bool:
    """Whether this bias, if it is a matrix's, is the model's."""
    part = place.split(".")[-2]
    if part in ("q", "k", "v"):
        return config.qkv_bias
    return config.out_bias if part == "out" else config.mlp_bias or part not in ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Part:
    """A place's rows in a tensor of the file, whose leading dimensions count as one."""

    name: str
    first_row: int
    shape: tuple[int, ...]


def place_parts(names: Names, config: ModelConfig, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """Every place that the file fills. A tensor without a place keeps its name, and the loader refuses it."""
    parts: dict[str, Part] = {}
    for name, shape in tensors.items():
        places = names.places(name)
        if len(places) > 1 or len(shape) > 2:
            found = _cut(name, shape, places, config)
        else:
            found = {places[0] if places else name: Part(name, 0, shape)}
        for place, part in found.items():
            if place in parts:
                raise WeightsError(f"tensor {name!r}: {parts[place].name!r} holds the same")
            parts[place] = part
    return parts


def _cut(name: str, shape: tuple[int, ...], places: tuple[str, ...], config: ModelConfig) -> dict[str, Part]:
    if not places or not 1 <= len(shape) <= _MAX_RANK:
        return {name: Part(name, 0, shape)}
    row_shape = shape[1:] if len(shape) < 3 else shape[-1:]
    rows = [_num_rows(place, config) for place in places]
    if sum(rows) != prod(shape) // max(1, prod(row_shape)):
        raise WeightsError(f"tensor {name!r}: {sum(rows)} rows expected, found shape {shape}")
    firsts = [0, *accumulate(rows)]
    return {place: Part(name, firsts[i], (rows[i], *row_shape)) for i, place in enumerate(places)}


def _num_rows(place: str, config: ModelConfig) -> int:
    part = place.split(".")[-2]
    if part == "q":
        return config.num_heads * config.head_dim
    if part in ("k", "v"):
        return config.num_kv_heads * config.head_dim
    if part == "down":
        return config.hidden_size
    if config.latent is not None and part in ("k_b", "v_b"):
        return config.num_heads * (config.latent.rank if part == "k_b" else config.latent.value_dim)
    if ".experts." in place:
        assert config.experts is not None
        return config.experts.intermediate_size
    return config.intermediate_size
