"""One layer's paged cache of keys and values, and what is stored in it: as it is, or in eight bits.

In eight bits every token and head has a scale of its own, so what is stored of a token depends on that token alone:

    largest = max(|x|) over the head, at least SMALLEST;   scale = largest / limit;   code = x (limit / largest)

to the nearest, ties to even; limit is 127 for int8 and 448 for float8_e4m3fn (see `scaled_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton
from kernels.scaled_rows import LIMITS, scale_rows_reference


@dataclass(frozen=True, slots=True)
class KvCache:
    k: torch.Tensor  # [num_blocks, Hkv, block_size, D]: float32, float16, bfloat16, int8 or float8_e4m3fn
    v: torch.Tensor
    k_scale: torch.Tensor | None = None  # float32 [num_blocks, Hkv, block_size], in eight bits
    v_scale: torch.Tensor | None = None

    @property
    def quantized(self) -> bool:
        return self.k_scale is not None

    def tensors(self) -> list[torch.Tensor]:
        """Each once."""
        pairs = [(self.k, self.v), (self.k_scale, self.v_scale)]
        return [t for k, v in pairs for t in ((k,) if v is k else (k, v)) if t is not None]


def empty_kv_cache(
    num_blocks: int, num_kv_heads: int, block_size: int, dim: int, dtype: torch.dtype, device: torch.device | str,
    shared: bool = False,
) -> KvCache:  # fmt: skip
    """Filled with zeros. shared: K and V are the same numbers, kept once."""
    shape, parts = (num_blocks, num_kv_heads, block_size, dim), "k" if shared else "kv"
    plain = torch.uint8 if dtype.itemsize == 1 else dtype
    values = [torch.zeros(shape, dtype=plain, device=device).view(dtype) for _ in parts]
    scales = [torch.zeros(shape[:3], dtype=torch.float32, device=device) if dtype in LIMITS else None for _ in parts]
    return KvCache(values[0], values[-1], scales[0], scales[-1])


def kv_store(k: torch.Tensor, v: torch.Tensor, cache: KvCache, slots: torch.Tensor) -> None:
    """Store k and v [N, Hkv, D] at the slots (int64 [N], block times block_size plus offset; negative: nowhere)."""
    num_kv_heads, dim = cache.k.shape[1], cache.k.shape[3]
    if k.shape != v.shape or k.dim() != 3 or k.shape[1:] != (num_kv_heads, dim) or cache.k.shape != cache.v.shape:
        raise ValueError(f"kv_store: k {tuple(k.shape)}, v {tuple(v.shape)}, cache {tuple(cache.k.shape)}")
    if slots.dtype != torch.int64 or slots.shape != k.shape[:1]:
        raise ValueError(f"kv_store: slots {slots.dtype} {tuple(slots.shape)} for {k.shape[0]} tokens")
    if cache.quantized != (cache.k.dtype in LIMITS) or (cache.k_scale is None) != (cache.v_scale is None):
        raise ValueError(f"kv_store: scales belong to a cache in eight bits, this one is {cache.k.dtype}")
    if uses_triton(k):
        from kernels.gpu.kv_cache import kv_store_triton  # where there is no GPU, there need be no Triton

        kv_store_triton(k, v, cache, slots)
    else:
        kv_store_reference(k, v, cache, slots)


def kv_store_reference(k: torch.Tensor, v: torch.Tensor, cache: KvCache, slots: torch.Tensor) -> None:
    block_size, kept = cache.k.shape[2], slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    for x, values, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        x = x[kept]
        if scales is None:
            values[blocks, :, offsets] = x.to(values.dtype)
            continue
        rows = scale_rows_reference(x.reshape(-1, x.shape[2]), values.dtype)
        values.view(torch.uint8)[blocks, :, offsets] = rows.q.view(torch.uint8).view(x.shape)
        scales[blocks, :, offsets] = rows.scale.view(x.shape[:2])


def copy_blocks(cache: KvCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks (int64 [n] each). A target occurs once and is no source of the same call."""
    if sources.dtype != torch.int64 or targets.dtype != torch.int64 or sources.shape != targets.shape:
        raise ValueError(f"copy_blocks: sources {tuple(sources.shape)}, targets {tuple(targets.shape)}, int64 expected")
    if uses_triton(cache.k):
        from kernels.gpu.kv_cache import copy_blocks_triton  # as above

        copy_blocks_triton(cache, sources, targets)
    else:
        copy_blocks_reference(cache, sources, targets)


def copy_blocks_reference(cache: KvCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    for tensor in cache.tensors():
        plain = tensor.view(torch.uint8)
        plain[targets] = plain[sources]
