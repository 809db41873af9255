"""How many KV blocks a card holds beside weights and steps. The arithmetic is apart from the card, which is asked.

A worker uses at most its share of the card, and of that only what others had left when it began. What remains after
weights and the largest step is the pool's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from services.gpu_worker.model.config import NotOnGpuError

GIB = 1 << 30
LEAST_SPARE = 512 << 20  # left alone: for graphs, what libraries allocate by themselves, and holes between tensors


class Card(Protocol):
    total_bytes: int

    def free_bytes(self) -> int: ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """What this process holds at most while it runs, beyond what it holds before."""
        ...


class CudaCard:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.mem_get_info(device)[1]

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


@dataclass(frozen=True, slots=True)
class Beside:
    """What guesses beside a model takes: bytes of weights, of its largest step, with what is kept for it to read, and
    of each block."""

    weight_bytes: int
    step_bytes: int
    block_bytes: int


NOTHING_BESIDE = Beside(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: of the card, free when the worker began; share: of the card that it may use."""

    total: int
    free: int
    share: float

    @property
    def usable(self) -> int:
        return min(int(self.total * self.share), self.free - self.spare)

    @property
    def spare(self) -> int:
        return max(LEAST_SPARE, self.total // 32)

    def check_weights(self, num_bytes: int) -> None:
        """NotOnGpuError, before they are read, if they do not fit."""
        if num_bytes >= self.usable:
            raise NotOnGpuError(f"{self}; the weights alone take {_gib(num_bytes)}")

    def room(self, *, taken: int, step: int, block_bytes: int, most_useful: int) -> int:
        """How many blocks there is room for. taken: by this worker, weights and all; step: what the largest one takes
        beside."""
        return max(0, min((self.usable - taken - step) // block_bytes, most_useful))

    def num_blocks(self, *, taken: int, step: int, block_bytes: int, most_useful: int) -> int:
        """As `room`; NotOnGpuError if there is none for a block."""
        num_blocks = self.room(taken=taken, step=step, block_bytes=block_bytes, most_useful=most_useful)
        if num_blocks < 1:
            raise NotOnGpuError(
                f"{self}; weights take {_gib(taken)} and a step up to {_gib(step)}, which leaves no room for keys and "
                "values (steps are smaller with less --max-num-batched-tokens or --max-num-seqs)"
            )
        return num_blocks

    def __str__(self) -> str:
        share = int(self.total * self.share)
        text = f"gpu_memory_utilization: {self.share:g} of the card's {_gib(self.total)} is {_gib(share)}"
        if not self._is_short:
            return text
        return f"{text}, and others have left {_gib(self.free)}, of which {_gib(self.spare)} stay free"

    @property
    def shortened(self) -> str:
        """What to tell of memory that others have; empty if there is nothing to tell."""
        return f"{self}: the KV pool is smaller" if self._is_short else ""

    @property
    def _is_short(self) -> bool:
        return self.usable < int(self.total * self.share)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
