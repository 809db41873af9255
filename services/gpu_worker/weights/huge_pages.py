"""Memory for weights in huge pages, where the system gives them: a step reads all of them, and a processor's table of
small pages is too short for that.

Weights lie one after the other in the order in which they came, which is about the order in which a step reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap

import torch

from kernels.native.structs import address
from kernels.packed_weight import PackedWeight

HUGE_PAGE = 1 << 21
REGION_BYTES = 64 << 20  # address space; what is never written takes no memory
LINE = 64


class WeightMemory:
    """Regions end with the last weight that lies in them."""

    def __init__(self, region_bytes: int = REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._region = torch.empty(0, dtype=torch.uint8)  # what is left of it

    def keep(self, weight: PackedWeight) -> PackedWeight:
        """The same numbers, here."""

        def moved(plane: torch.Tensor | None) -> torch.Tensor | None:
            return None if plane is None else self._copy(plane)

        return dataclasses.replace(
            weight, codes=self._copy(weight.codes), high=moved(weight.high), d=moved(weight.d), m=moved(weight.m),
            sub=moved(weight.sub), sub_min=moved(weight.sub_min),
        )  # fmt: skip

    def _copy(self, plane: torch.Tensor) -> torch.Tensor:
        num_bytes = plane.numel() * plane.element_size()
        if num_bytes > len(self._region):
            self._region = _region(max(self._region_bytes, num_bytes))
        place, self._region = self._region[:num_bytes], self._region[-(-num_bytes // LINE) * LINE :]
        return place.view(plane.dtype).view(plane.shape).copy_(plane)


def _region(num_bytes: int) -> torch.Tensor:
    """From the start of a huge page on."""
    try:
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"no memory for weights of {num_bytes} bytes") from e
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(advice)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    start = -(address(everything) or 0) % HUGE_PAGE
    return everything[start : start + num_bytes]
