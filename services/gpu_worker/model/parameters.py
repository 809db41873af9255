"""Every parameter of a model by its place and shape, from its configuration alone. *Pure.*

The loaders check that a file holds exactly these; here they are counted without a file.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.gpu_worker.model.config import ALL_NORMS, LatentConfig, ModelConfig

Parameter = tuple[str, tuple[int, ...]]  # place, shape


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Without an output head where the configuration says that the embedding is one."""
    yield "embedding.weight", (config.vocab_size, config.hidden_size)
    for number in range(config.num_layers):
        yield from _layer(config, number)
    yield from _norm(config, "final_norm", config.hidden_size)
    if not config.tied:
        yield "head.weight", (config.vocab_size, config.hidden_size)


def _layer(config: ModelConfig, number: int) -> Iterator[Parameter]:
    at, hidden = f"layers.{number}.", config.hidden_size
    for name in ALL_NORMS:
        if name in config.norms:
            yield from _norm(config, at + name, hidden)
    if config.latent is not None:
        yield from _latent(config, config.latent, at)
    else:
        yield from _attention(config, at)
    if config.layers[number].sparse:
        yield from _experts(config, at)
    else:
        yield from _ffn(config, at, config.intermediate_size)


def _attention(config: ModelConfig, at: str) -> Iterator[Parameter]:
    hidden = config.hidden_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, rows in (("q", heads), ("k", kv), ("v", kv)):
        yield from _linear(at + name, rows, hidden, config.qkv_bias)
        if config.qk_norm and name != "v":
            yield f"{at}{name}_norm.weight", (rows if config.qk_norm == "row" else config.head_dim,)
    yield from _linear(f"{at}out", hidden, heads, config.out_bias)


def _latent(config: ModelConfig, latent: LatentConfig, at: str) -> Iterator[Parameter]:
    heads, hidden, q_rank = config.num_heads, config.hidden_size, latent.q_rank
    q_rows = heads * (latent.nope_dim + latent.rope_dim)
    if q_rank:
        yield f"{at}q_a.weight", (q_rank, hidden)
        yield f"{at}q_norm.weight", (q_rank,)
    yield f"{at}{'q_b' if q_rank else 'q'}.weight", (q_rows, q_rank or hidden)
    yield f"{at}kv_a.weight", (latent.row, hidden)
    yield f"{at}k_norm.weight", (latent.rank,)
    yield f"{at}kv_b.weight", (heads * (latent.nope_dim + latent.value_dim), latent.rank)
    yield from _linear(f"{at}out", hidden, heads * latent.value_dim, config.out_bias)


def _ffn(config: ModelConfig, at: str, size: int) -> Iterator[Parameter]:
    for name in ("gate", "up") if config.gated else ("up",):
        yield from _linear(at + name, size, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{at}down", config.hidden_size, size, config.mlp_bias)


def _experts(config: ModelConfig, at: str) -> Iterator[Parameter]:
    experts = config.experts
    assert experts is not None
    yield f"{at}router.weight", (experts.num_experts, config.hidden_size)
    if experts.choice_bias:
        yield f"{at}choice.bias", (experts.num_experts,)
    for number in range(experts.num_experts):
        yield from _ffn(config, f"{at}experts.{number}.", experts.intermediate_size)
    if experts.shared_size:
        yield from _ffn(config, f"{at}shared.", experts.shared_size)
    if experts.shared_gate:
        yield f"{at}shared_gate.weight", (1, config.hidden_size)


def _linear(place: str, rows: int, columns: int, bias: bool) -> Iterator[Parameter]:
    yield f"{place}.weight", (rows, columns)
    if bias:
        yield f"{place}.bias", (rows,)


def _norm(config: ModelConfig, place: str, size: int) -> Iterator[Parameter]:
    yield f"{place}.weight", (size,)
    if config.norm == "layer":
        yield f"{place}.bias", (size,)
