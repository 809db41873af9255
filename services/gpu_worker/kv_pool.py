"""The bytes of the paged KV cache. Which block belongs to whom is the cache store's to know, not this file's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kernels.kv_cache import KvCache
from kernels.scaled_rows import LIMITS
from services.gpu_worker.model.config import ModelConfig

LAYOUT = "block-head-slot-dim"  # part of the kernel variant: what a block's bytes mean
DEFAULT_MOST_BYTES = 4 << 30
SCALE_BYTES = 4  # of each slot and head, in eight bits
CGROUP = Path("/sys/fs/cgroup")
DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn,
}  # fmt: skip


class KVPool:
    """One cache a layer, of num_blocks + 1 blocks: the last is never written and stands in, as zeros, for blocks that a
    short sequence does not have."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, shared: bool = False,
    ) -> None:  # fmt: skip
        """shared: K and V are the same numbers, kept once."""
        self.num_blocks = num_blocks
        shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
        self.layers = tuple(_cache(shape, dtype, shared) for _ in range(num_layers))


def _cache(shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> KvCache:
    parts = "k" if shared else "kv"
    values = [_zeros(shape, dtype) for _ in parts]
    scales = [_zeros(shape[:3], torch.float32) for _ in parts] if dtype in LIMITS else [None]
    return KvCache(values[0], values[-1], scales[0], scales[-1])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """numpy takes zeroed pages from the system, which cost nothing until written; torch.zeros writes them all."""
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)).view(dtype)


def cache_dtype(name: str) -> torch.dtype:
    """auto is float32 on CPU: torch computes on it directly, and float16 would be converted at every read."""
    if name != "auto" and name not in DTYPES:
        raise ValueError(f"kv_cache_dtype: {name!r} is not supported (known: auto, {', '.join(DTYPES)})")
    return DTYPES.get(name, torch.float32)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Of one KV block in all layers, with scales."""
    head_bytes = config.cache_dim * dtype.itemsize + (SCALE_BYTES if dtype in LIMITS else 0)
    num_parts = 2 if config.latent is None else 1
    return num_parts * config.num_layers * config.cache_heads * block_size * head_bytes


def num_blocks_for(kv_cache_bytes: int | None, block_bytes: int, most_useful: int) -> int:
    """How many blocks to hold: as many as kv_cache_bytes buys, or by default up to most_useful of them in a quarter
    of the memory that is available now, at most 4 GiB. ValueError if that is not one."""
    if kv_cache_bytes is None:
        budget = min(DEFAULT_MOST_BYTES, available_bytes() // 4)
        num_blocks = min(budget // block_bytes, most_useful)
    else:
        num_blocks = kv_cache_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(f"kv_cache_bytes: not one block of {block_bytes} bytes fits")
    return num_blocks


def available_bytes() -> int:
    """Memory that can be had now: of the system, or of the container where that is less."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (_cgroup_value(name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _cgroup_value(name: str) -> int | None:
    """A number of the cgroup (version 2) we run in; None where there is none or no limit."""
    try:
        return int((CGROUP / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
