"""What every op with a Triton kernel is asked: is it right, and does a row's result depend on that row alone?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

SIZES = (1, 63, 100)  # none a power of two, so that every mask is needed


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """x [M, ...], its rows apart in memory, with NaN (or 99) between them."""
    wide = x.new_full((x.shape[0] * 2 + 1, *x.shape[1:-1], x.shape[-1] + 3), torch.nan if x.is_floating_point() else 99)
    part = wide[1::2][: x.shape[0], ..., : x.shape[-1]]
    part.copy_(x)
    assert not part.is_contiguous() or x.shape[0] == 1
    return part


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, also where both are NaN; -0 is not 0."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_rows_alone(
    op: Callable[[torch.Tensor], Sequence[torch.Tensor]], rows: torch.Tensor, counts: Sequence[int] = (2, 5)
) -> None:
    """op: rows [M, ...] → tensors [M, ...]. Each row's are the same bits alone, among others, and at every place."""
    alone = [op(row[None]) for row in rows]
    generator = torch.Generator().manual_seed(0)
    for count in counts:
        index = torch.randint(0, len(rows), (count,), generator=generator)
        for k, together in enumerate(op(rows[index])):
            for i, j in enumerate(index.tolist()):
                assert same_bits(together[i], alone[j][k][0]), f"output {k} of row {j}, as number {i} of {count}"
