"""`--quantization`: floats become codes while they are loaded, whatever format their file has.

The matrices of layers are quantised: int8 and int4 with a scale for 32 columns (Q8_0, Q4_0), fp8 (E4M3) with one for a
row. Embedding, output head and what chooses experts stay as they are stored. A file that is quantised already is
refused, unless that is the same.
"""

from __future__ import annotations

import torch

from kernels.matmul_w8a8 import ScaledWeight
from kernels.packed_weight import GROUP, Codes, dequantize
from kernels.scaled_rows import scale_rows
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.weights.quantizers import quantize
from services.gpu_worker.weights.source import CHUNK_BYTES, Coded, WeightsError, WeightSource

TYPES = {"int8": "Q8_0", "int4": "Q4_0", "fp8": "F16"}  # as which native kernels hold them
_SAME = {"int8": ("Q8_0",), "int4": ("Q4_0",), "fp8": ("fp8", "fbgemm_fp8")}
_LINEARS = ("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b", "k_b", "v_b", "out", "gate", "up", "down")


def is_quantized(place: str) -> bool:
    """Whether a tensor of this place is one of the matrices that are quantised."""
    parts = place.split(".")
    return parts[0] == "layers" and parts[-1] == "weight" and parts[-2] in _LINEARS


def check_columns(name: str, columns: int, method: str) -> None:
    if method != "fp8" and columns % GROUP:
        raise WeightsError(
            f"tensor {name!r}: {columns} columns are not whole groups of {GROUP} (quantization: {method})"
        )


def check_stored(name: str, stored_as: str, method: str) -> bool:
    """Whether there is something to quantise; ConfigError where the file is quantised another way."""
    if stored_as and stored_as not in _SAME[method]:
        raise ConfigError(f"quantization: {method} is not possible, tensor {name!r} is quantised already ({stored_as})")
    return not stored_as


class QuantizingSource:
    """A `WeightSource` like the one that it reads."""

    def __init__(self, source: WeightSource, method: str) -> None:
        if method not in TYPES:
            raise ConfigError(f"quantization: {method!r} is not supported (known: none, {', '.join(TYPES)})")
        self._source = source
        self._method = method
        self.config, self.family, self.shapes = source.config, source.family, source.shapes
        self.file_name, self.release, self.quantized_as = source.file_name, source.release, source.quantized_as
        self.identity = f"{source.identity}-{method}"
        matrices = [place for place in source.shapes if is_quantized(place)]
        self._places = {p for p in matrices if check_stored(source.file_name(p), source.quantized_as(p), method)}
        for place in filter(self._places.__contains__, matrices):
            check_columns(source.file_name(place), source.shapes[place][-1], method)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self._source.read_into(name, out)
        if name in self._places:
            step = max(1, CHUNK_BYTES // (4 * out.shape[1]))
            for start in range(0, out.shape[0], step):
                out[start : start + step] = self._values(out[start : start + step])

    def stored(self, name: str, start: int, end: int) -> Codes | torch.Tensor:
        rows = self._source.stored(name, start, end)
        if name not in self._places:
            return rows
        assert isinstance(rows, torch.Tensor)
        return self._values(rows).half() if self._method == "fp8" else quantize(rows, TYPES[self._method])

    def coded(self, name: str) -> Coded | None:
        if name not in self._places:
            return self._source.coded(name)
        rows = torch.empty(self.shapes[name])
        self._source.read_into(name, rows)
        if self._method != "fp8":
            return quantize(rows, TYPES[self._method])
        scaled = scale_rows(rows, torch.float8_e4m3fn)
        return ScaledWeight(scaled.q, scaled.scale.t().contiguous())

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """What the codes of these rows stand for, float32."""
        if self._method == "fp8":
            return scale_rows(rows, torch.float8_e4m3fn).dequantized()
        return dequantize(quantize(rows, TYPES[self._method]))
