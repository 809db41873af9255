"""Product with an unquantised weight: y = x W^T + bias, float32.

Row independence: the bits of a row of y depend on that row of x and on W alone. oneDNN's kernels for prepacked
weights hold to that from two rows on (measured: AVX2 and AVX-512, 2 to 1024 rows, 1 to 16 threads), MKL's behind
`F.linear` from eight when rows come in eights. So rows are padded to a multiple, and `DensePacker` tries each shape
of weight it packs; where a machine's numbers do depend on the row count, every call is cut to one fixed count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

PACKED_ROW_MULTIPLE = 4
PLAIN_ROW_MULTIPLE = 8
FIXED_ROWS = 16  # a call, where row counts show in the bits
_BUCKET_FROM, _BUCKET_ROWS = 32, 16
_TRIED_ROWS = (1, 2, 3, 5, 8, 13, 24, 36, 64, 160)
_TRY_BUDGET_FLOPS = 10e9  # a shape; the larger row counts of large weights are left out


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """W [out_features, in_features], ready to be multiplied with; packed: in oneDNN's block layout."""

    tensor: torch.Tensor
    out_features: int
    in_features: int
    packed: bool
    fixed_rows: int = 0  # 0: any multiple of the row multiple in one call

    @property
    def row_multiple(self) -> int:
        if self.fixed_rows:
            return self.fixed_rows
        return PACKED_ROW_MULTIPLE if self.packed else PLAIN_ROW_MULTIPLE


class DensePacker:
    """Packs weights for `matmul_dense` and remembers, shape by shape, whether rows were found independent."""

    def __init__(self) -> None:
        self._fixed_rows: dict[torch.Size, int] = {}

    def pack(self, weight: torch.Tensor) -> DenseWeight:
        """W [N, K] float32. Where packing is possible the result does not share memory with it."""
        if weight.dim() != 2 or weight.dtype != torch.float32:
            raise TypeError(f"pack: a float32 matrix expected, got {weight.dtype} {tuple(weight.shape)}")
        packed = weight.device.type == "cpu" and can_pack()
        tensor = torch.ops.mkldnn._reorder_linear_weight(weight, FIXED_ROWS) if packed else weight.contiguous()
        dense = DenseWeight(tensor, weight.shape[0], weight.shape[1], packed)
        if weight.shape not in self._fixed_rows:
            self._fixed_rows[weight.shape] = 0 if rows_are_independent(dense) else FIXED_ROWS
        return replace(dense, fixed_rows=self._fixed_rows[weight.shape])


def padded_rows(num_rows: int) -> int:
    """How many rows to give a step that has num_rows: a multiple that no product need pad again, and few different
    ones, since oneDNN builds a kernel (0.7 ms) for each row count it meets."""
    multiple = PACKED_ROW_MULTIPLE if num_rows <= _BUCKET_FROM else _BUCKET_ROWS
    return -(-num_rows // multiple) * multiple


def can_pack() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def rows_are_independent(weight: DenseWeight) -> bool:
    """Whether eight rows of x give the same bits at every place of calls with several row counts."""
    x = torch.randn(8, weight.in_features, generator=torch.Generator().manual_seed(0)).to(weight.tensor.device)
    want = matmul_dense(x, weight)
    flops = 0
    for num_rows in _TRIED_ROWS:
        flops += 2 * num_rows * weight.out_features * weight.in_features
        if num_rows > 8 and flops > _TRY_BUDGET_FLOPS:
            break
        index = torch.arange(num_rows, device=x.device) % 8
        if not torch.equal(matmul_dense(x[index], weight), want[index]):
            return False
    return True


def matmul_dense(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] -> [M, N]; M may be any number."""
    if x.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        raise TypeError(f"matmul_dense: float32 expected, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"matmul_dense: x {tuple(x.shape)} with W [{weight.out_features}, {weight.in_features}]")
    num_rows = x.shape[0]
    missing = -num_rows % weight.row_multiple
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    if weight.fixed_rows:
        y = torch.cat([_product(part, weight, bias) for part in torch.split(x, weight.fixed_rows)])
    else:
        y = _product(x, weight, bias)
    return y[:num_rows] if missing else y


def matmul_dense_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The specification, on the plain W [N, K]."""
    y = x.float() @ weight.float().t()
    return y if bias is None else y + bias.float()


def _product(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.packed:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight.tensor, bias, "none", [], "")
        return y
    return F.linear(x, weight.tensor, bias)
