"""Where a loader puts weights and how they are multiplied with; here on a CPU with torch, see also `on_device`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.matmul_dense import DensePacker
from services.gpu_worker.model.layers import (
    ExpertProduct,
    FeedForwardWeights,
    FloatTable,
    JoinedExperts,
    Linear,
    Product,
    Table,
)
from services.gpu_worker.weights.source import Coded


class Rows(Protocol):
    """Matrices with the same input, whose rows follow each other: to be read once, one way or the other."""

    def floats(self) -> torch.Tensor:
        """float32 [N, K], in fresh memory."""
        ...

    def stored(self) -> list[Coded | torch.Tensor]:
        """Each as products on a GPU take it, or as the file has it: see `WeightSource`."""
        ...


class Ends(Protocol):
    """An embedding and an output head of the same vocabulary."""

    @property
    def embedding(self) -> Table: ...

    @property
    def head(self) -> Product:
        """y is float32."""
        ...

    @property
    def differ(self) -> bool: ...


class Placement(Protocol):
    """Where weights are kept, and how they are multiplied with. Tensors have been read as float32, to fresh memory.

    turns_pairs: whether the decoder turns the pairs of latent attention as files have them, instead of in halves.
    """

    turns_pairs: bool

    def keep(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def projection(self, rows: Rows, bias: torch.Tensor | None) -> Product: ...

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """Weight [N, K]."""
        ...

    def by_head(self, weights: torch.Tensor) -> tuple[Product, ...] | ExpertProduct:
        """Weights [H, N, K], one for each head's rows."""
        ...

    def scores(self, weight: torch.Tensor) -> Product:
        """What experts are chosen by: y is float32."""
        ...

    def ends(self, embedding: Rows, head: Rows | None) -> Ends:
        """head: None where the embedding serves as one."""
        ...

    def experts(self, into: Sequence[Rows], down: Sequence[Rows]) -> tuple[FeedForwardWeights, ...] | JoinedExperts:
        """Of each expert its `FeedForwardWeights`, without biases."""
        ...


@dataclass(frozen=True, slots=True)
class FloatEnds:
    embedding: FloatTable
    head: Linear
    differ: bool


class InMemory:
    """For torch on a CPU."""

    turns_pairs = False

    def __init__(self) -> None:
        self._packer = DensePacker()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def projection(self, rows: Rows, bias: torch.Tensor | None) -> Linear:
        return self.product(rows.floats(), bias)

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(self._packer.pack(weight), bias)

    def by_head(self, weights: torch.Tensor) -> tuple[Linear, ...]:
        return tuple(self.product(weight.contiguous(), None) for weight in weights)

    def scores(self, weight: torch.Tensor) -> Linear:
        return self.product(weight, None)

    def ends(self, embedding: Rows, head: Rows | None) -> FloatEnds:
        table = embedding.floats()
        weight = table if head is None else head.floats()
        return FloatEnds(
            FloatTable(table), self.product(weight, None), head is not None and not torch.equal(weight, table)
        )

    def experts(self, into: Sequence[Rows], down: Sequence[Rows]) -> tuple[FeedForwardWeights, ...]:
        pairs = zip(into, down, strict=True)
        return tuple(FeedForwardWeights(self.projection(a, None), self.projection(b, None)) for a, b in pairs)
