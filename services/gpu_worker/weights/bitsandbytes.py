"""bitsandbytes checkpoints: 4-bit codes of a table with a scale a block (perhaps quantised too), or int8 rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from services.gpu_worker.weights.scaled import ScaledMatrix
from services.gpu_worker.weights.source import WeightsError
from services.gpu_worker.weights.stored_tensors import FLOATS, Module, StoredTensor

STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


@dataclass(frozen=True, slots=True)
class TableMatrix:
    """w = table[q] scale[block]; of a byte the high four bits come first, blocks run on from row to row."""

    packed: StoredTensor  # uint8 [N K / 2, 1]
    table: torch.Tensor  # float32 [16]
    scales: torch.Tensor  # float32 [N K / block]
    block: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, module: Module) -> TableMatrix:
        suffix = next((state for state in STATES if module.has(state)), STATES[0])
        state = _state(module.take(suffix, ("U8",), (None,)))
        rows, columns = _sizes(state.get("shape"), module.stem)
        block = state.get("blocksize")
        if type(block) is not int or block < 1 or rows * columns % block or columns % 2:
            raise WeightsError(f"tensor {module.stem + '.' + suffix!r}: blocksize {block!r} for {rows} x {columns}")
        packed = module.take("weight", ("U8",), (rows * columns // 2, 1))
        table = module.take("weight.quant_map", ("F32",), (16,)).whole()
        absmax = module.take("weight.absmax", (*FLOATS, "U8"), (rows * columns // block,))
        scales = _nested(module, state, absmax) if absmax.dtype == "U8" else absmax.whole().float()
        return cls(packed, table, scales, block, (rows, columns))

    def rows(self, start: int, end: int) -> torch.Tensor:
        columns = self.shape[1]
        packed = self.packed.rows(start * columns // 2, end * columns // 2).flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()
        blocks = torch.arange(start * columns, end * columns) // self.block
        return (self.table[codes] * self.scales[blocks]).view(end - start, columns)


def int8_matrix(module: Module) -> ScaledMatrix:
    """w = q SCB / 127, a largest value a row."""
    codes = module.take("weight", ("I8",), (None, None))
    if module.has("weight_format") and module.take("weight_format", ("U8",)).whole().flatten().tolist() != [0]:
        raise WeightsError(f"tensor {module.stem + '.weight_format'!r}: rows for a kind of GPU are not supported")
    largest = module.take("SCB", FLOATS, (codes.shape[0],)).whole().float()
    return ScaledMatrix(codes, largest[:, None] / 127.0, None, 1, codes.shape[1], codes.shape)


def _nested(module: Module, state: dict[str, Any], absmax: StoredTensor) -> torch.Tensor:
    """Scales that are codes of a second table, plus an offset."""
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or type(offset) is not float:
        raise WeightsError(f"tensor {absmax.name!r}: its quant_state has no nested_blocksize or nested_offset")
    table = module.take("weight.nested_quant_map", ("F32",), (256,)).whole()
    count = absmax.shape[0]
    largest = module.take("weight.nested_absmax", ("F32",), (-(-count // size),)).whole()
    return table[absmax.whole().long()] * largest[torch.arange(count) // size] + offset


def _state(tensor: StoredTensor) -> dict[str, Any]:
    if tensor.shape[0] > 1 << 16:
        raise WeightsError(f"tensor {tensor.name!r}: {tensor.shape[0]} bytes are no quant_state")
    try:
        state = json.loads(bytes(tensor.whole().tolist()))
    except (ValueError, RecursionError) as e:
        raise WeightsError(f"tensor {tensor.name!r}: {e}") from e
    if not isinstance(state, dict):
        raise WeightsError(f"tensor {tensor.name!r}: not an object")
    return state


def _sizes(shape: Any, stem: str) -> tuple[int, int]:
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 1 <= n < 1 << 31 for n in shape):
        raise WeightsError(f"tensor {stem + '.weight'!r}: its quant_state says shape {shape!r}")
    return shape[0], shape[1]
