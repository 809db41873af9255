"""The ops of a GPU at a model's sizes: what each is given and should give, in float64, and the least it could take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.attention import AttentionOptions, attention, attention_batch
from kernels.draw_tokens import draw_rows, draw_tokens, draw_tokens_reference
from kernels.gated_activation import gated_activation
from kernels.gumbel import NoiseKey
from kernels.kv_cache import KvCache, kv_store
from kernels.log_sums import log_sums
from kernels.matmul import matmul, prepare
from kernels.matmul_w8a8 import ScaledWeight
from kernels.planar_weight import GroupedCodes
from kernels.rms_norm import rms_norm
from kernels.sample_tokens import TokenChoice
from kernels.scaled_rows import scale_rows


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    rows: tuple[int, ...]  # of products and drawn
    context: int
    chunk: int  # rows of a prompt
    batches: tuple[int, ...]  # decoding
    steps: int


CARD = Sizes(4096, 14336, 32, 32, 8, 128, 128256, (1, 16, 64, 256), 2048, 8192, (1, 8, 64, 256), 32)
TINY = Sizes(64, 96, 2, 4, 2, 16, 300, (1, 3), 20, 12, (1, 3), 4)


@dataclass(frozen=True, slots=True)
class Case:
    """num_bytes and num_flops: what cannot be avoided. error: the largest difference, relative to the largest value."""

    name: str
    run: Callable[[], torch.Tensor]
    want: Callable[[], torch.Tensor]
    error: float
    num_bytes: int
    num_flops: int = 0
    goal: float = 0.0  # of the floor


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    yield from _row_cases(sizes, randn, tolerance)
    for rows in sizes.rows:
        yield from _product_cases(sizes, rows, randn, tolerance)
    for name, batch, rows in (
        ("decode", max(sizes.batches), 1),
        ("draft of 8", max(sizes.batches), 8),
        ("chunk", 1, sizes.chunk),
    ):
        yield _attention_case(name, sizes, batch, rows, randn, tolerance)
    for rows in sizes.rows:
        yield from _draw_cases(sizes, rows, randn)


Randn = Callable[..., torch.Tensor]


def _row_cases(sizes: Sizes, randn: Randn, error: float) -> Iterator[Case]:
    rows = max(sizes.rows)
    x, weight = randn(rows, sizes.hidden), torch.ones(sizes.hidden, device=randn(1).device)

    def normed() -> torch.Tensor:
        wide = x.double()
        return wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    yield Case(f"rms_norm {rows}", lambda: rms_norm(x, weight, 1e-5), normed, error, 2 * _bytes(x))
    pair = randn(rows, 2 * sizes.inner)

    def gated() -> torch.Tensor:
        gate, up = pair.double().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    yield Case(f"silu {rows}", lambda: gated_activation(pair, "silu"), gated, error, _bytes(pair) * 3 // 2)


def _product_cases(sizes: Sizes, rows: int, randn: Randn, error: float) -> Iterator[Case]:
    x, w = randn(rows, sizes.hidden), randn(2 * sizes.inner, sizes.hidden) * sizes.hidden**-0.5
    codes = torch.randint(0, 16, w.shape, device=x.device).byte()
    groups = max(1, sizes.hidden // 128)
    int4 = GroupedCodes(4, codes, torch.full((w.shape[0], groups), sizes.hidden**-0.5, device=x.device), centre=8)
    flops = 2 * rows * w.numel()
    codes8 = scale_rows(w.float().cpu(), torch.float8_e4m3fn)
    fp8 = ScaledWeight(codes8.q.to(x.device), codes8.scale.t().contiguous().to(x.device))
    goals = {"int4": 0.7 if rows <= 16 else 0.0, "fp8": 0.8 if rows <= 64 else 0.0}
    for name, prepared, plain in (
        ("dense", prepare(w, x.dtype, x.device), w), ("int4", prepare(int4, x.dtype, x.device), int4.values()),
        ("fp8", fp8, fp8.values()),
    ):  # fmt: skip
        moved = prepared.num_bytes + _bytes(x) + rows * w.shape[0] * x.element_size()
        yield Case(
            f"matmul {name} {rows}", partial(matmul, x, prepared), partial(_product, x, plain),
            0.05 if name == "fp8" else error, moved, flops, goals.get(name, 0.0),
        )  # fmt: skip


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.double() @ w.double().t()


def _attention_case(name: str, sizes: Sizes, batch: int, rows: int, randn: Randn, error: float) -> Case:
    length = max(sizes.context, rows)
    size = 16
    blocks = -(-length // size)
    q = randn(batch * rows, sizes.heads, sizes.dim)
    cache = KvCache(*(randn(batch * blocks, sizes.kv_heads, size, sizes.dim) for _ in "kv"))
    table = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0)).view(batch, blocks)
    slots = torch.arange(size, device=q.device)
    kv_store(cache.k[0].transpose(0, 1), cache.v[0].transpose(0, 1), cache, slots)  # onto itself
    made = attention_batch(
        [rows] * batch, [length] * batch, table.tolist(), sizes.heads // sizes.kv_heads, device=q.device
    )
    options = AttentionOptions(sizes.dim**-0.5)

    def want() -> torch.Tensor:
        out = []
        for i in range(batch):
            k, v = (
                x[table[i].to(x.device)].transpose(1, 2).reshape(-1, sizes.kv_heads, sizes.dim)[:length].double()
                for x in (cache.k, cache.v)
            )
            own = q[i * rows : (i + 1) * rows].double()
            hidden = torch.ones(rows, length, dtype=torch.bool, device=q.device).triu(length - rows + 1)
            heads = []
            for head in range(sizes.heads):  # one at a time: float64 scores of all are more than a card holds
                kv_head = head * sizes.kv_heads // sizes.heads
                scores = (own[:, head] @ k[:, kv_head].t() * options.scale).masked_fill(hidden, -torch.inf)
                heads.append(scores.softmax(-1) @ v[:, kv_head])
            out.append(torch.stack(heads, 1))
        return torch.cat(out)

    keys = batch * length * sizes.kv_heads * sizes.dim * 2 * q.element_size()
    seen = batch * rows * (length - rows / 2) * sizes.heads * sizes.dim
    return Case(
        f"attention {name}, {batch} x {length}", lambda: attention(q, cache, made, options), want, error,
        keys + 2 * _bytes(q), int(4 * seen), 0.8 if rows == 1 else 0.0,
    )  # fmt: skip


def _draw_cases(sizes: Sizes, rows: int, randn: Randn) -> Iterator[Case]:
    logits = randn(rows, sizes.vocabulary).float() * 4
    key = NoiseKey(7, 0, 0)
    choices = {"greedy": TokenChoice(key, 0.0), "noise": TokenChoice(key), "top-p": TokenChoice(key, top_p=0.9)}
    for name, choice in choices.items():
        made = draw_rows([choice] * rows)
        there = made.with_tensors([t.to(logits.device) for t in made.tensors()])
        want = partial(draw_tokens_reference, logits.cpu(), made)
        yield Case(f"draw {name} {rows}", partial(draw_tokens, logits, there), want, 0.0, _bytes(logits))

    yield Case(
        f"log_sums {rows}", lambda: log_sums(logits, 5).best.double(),
        lambda: logits.double().topk(min(5, sizes.vocabulary)).values, 0.0, _bytes(logits),
    )  # fmt: skip


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
