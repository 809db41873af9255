"""The pool's size and shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.gpu_worker import kv_pool
from services.gpu_worker.kv_pool import KVPool, available_bytes, cache_dtype, num_blocks_for


def test_shape_and_zero_block() -> None:
    pool = KVPool(num_blocks=5, block_size=16, num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.float16)
    assert len(pool.layers) == 2
    for cache in pool.layers:
        assert cache.k.shape == cache.v.shape == (6, 3, 16, 8)
        assert cache.k.dtype == torch.float16
        assert not cache.k.any() and not cache.v.any()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_in_eight_bits_every_slot_has_a_scale(name: str) -> None:
    pool = KVPool(num_blocks=5, block_size=16, num_layers=1, num_kv_heads=3, head_dim=8, dtype=cache_dtype(name))
    [cache] = pool.layers
    assert cache.k.dtype == cache.v.dtype == cache_dtype(name)
    assert cache.k_scale is not None and cache.k_scale.shape == (6, 3, 16) and not cache.k_scale.any()


GROWTH = """
import torch
from pathlib import Path
from services.gpu_worker.kv_pool import KVPool

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident_bytes()
pool = KVPool(num_blocks=4000, block_size=16, num_layers=2, num_kv_heads=4, head_dim=64, dtype=torch.float32)
print(resident_bytes() - before, sum(cache.k.nbytes + cache.v.nbytes for cache in pool.layers))
"""


def test_an_unused_pool_takes_no_memory() -> None:
    """In a process of its own: a heap that others have used has pages to give that must be cleared."""
    done = subprocess.run([sys.executable, "-c", GROWTH], check=True, capture_output=True, text=True)
    growth, size = map(int, done.stdout.split())
    assert size > 200 << 20 and growth < size / 4


def test_size_follows_what_is_asked_for() -> None:
    assert num_blocks_for(1000, 100, most_useful=3) == 10
    assert num_blocks_for(199, 100, most_useful=3) == 1
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        num_blocks_for(99, 100, most_useful=3)


def test_default_size_is_a_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "available_bytes", lambda: 4000)
    assert num_blocks_for(None, 100, most_useful=1000) == 10
    assert num_blocks_for(None, 100, most_useful=4) == 4
    monkeypatch.setattr(kv_pool, "available_bytes", lambda: 1 << 60)
    assert num_blocks_for(None, 1 << 20, most_useful=1 << 40) == 4096


def test_dtypes() -> None:
    assert cache_dtype("auto") == torch.float32
    assert cache_dtype("float16") == torch.float16
    assert cache_dtype("int8") == torch.int8
    with pytest.raises(ValueError, match="kv_cache_dtype: 'fp8'"):
        cache_dtype("fp8")


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "CGROUP", tmp_path)
    assert available_bytes() > 1 << 20  # no cgroup: what the system has
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 1 << 20
    (tmp_path / "memory.max").write_text("5000000\n")
    assert available_bytes() == 3_000_000
