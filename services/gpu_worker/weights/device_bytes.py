"""How many bytes a parameter takes on a GPU: the loader's own preparing is asked, with one row and with two. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from kernels.matmul import prepare
from kernels.matmul_w8a8 import GROUP as SCALED_GROUP
from kernels.matmul_w8a8 import ScaledWeight
from kernels.packed_weight import GROUP, SCHEMES, SUPER_GROUP, Codes
from kernels.planar_weight import GroupedCodes
from services.gpu_worker.weights.source import Coded


@dataclass(frozen=True, slots=True)
class Grouping:
    """Integers with a scale for each group of columns; group 0: one for all of a row."""

    bits: int
    group: int
    centred: bool
    in_order: bool = True

    @property
    def centre(self) -> int:
        return 1 << self.bits - 1 if self.centred else 0


@dataclass(frozen=True, slots=True)
class Scaling:
    """int8 or float8_e4m3fn, multiplied with activations of that type; group as in `Grouping`."""

    dtype: torch.dtype
    group: int


Form = str | Grouping | Scaling | None  # a type of `SCHEMES` by name; None: floats


def device_bytes(form: Form, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of a parameter that a file has in this form, where products are computed in dtype. Vectors are float32."""
    return 4 * prod(shape) if len(shape) == 1 else _matrix_bytes(form, *shape, dtype)


@lru_cache(1024)
def _matrix_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
    one, two = (prepare(_zeros_in(form, count, columns), dtype, "cpu").num_bytes for count in (1, 2))
    return one + (rows - 1) * (two - one)


def _zeros_in(form: Form, rows: int, columns: int) -> Coded | torch.Tensor:
    """What a source gives the loader of such a matrix."""
    if isinstance(form, str):
        return _codes(form, rows, columns)
    if form is None or (form.group and columns % form.group):
        return torch.zeros(rows, columns)
    groups = columns // form.group if form.group else 1
    if isinstance(form, Grouping):
        q, scale = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, groups)
        order = None if form.in_order else torch.arange(columns)
        return GroupedCodes(form.bits, q, scale, None if form.centred else scale, form.centre, order)
    if groups != 1 and form.group != SCALED_GROUP:
        return torch.zeros(rows, columns)
    return ScaledWeight(torch.zeros(rows, columns, dtype=form.dtype), torch.zeros(groups, rows))


def _codes(type_name: str, rows: int, columns: int) -> Codes:
    scheme = SCHEMES[type_name]
    q = torch.zeros(rows, columns, dtype=torch.int8 if type_name == "Q8_0" else torch.uint8)
    d = torch.zeros(rows, columns // (SUPER_GROUP if scheme.sub_columns else GROUP)).half()
    sub = torch.zeros(rows, columns // scheme.sub_columns, dtype=torch.uint8) if scheme.sub_columns else None
    return Codes(type_name, q, d, d if scheme.has_m else None, sub, sub if scheme.has_m else None)
