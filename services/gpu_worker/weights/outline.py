"""What a model's weights are without reading them: every parameter with its type, from config.json or a GGUF header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from kernels.packed_weight import GROUP
from services.gpu_worker.model.config import Keys, ModelConfig
from services.gpu_worker.model.hf_config import config_from_hf
from services.gpu_worker.model.parameters import parameters
from services.gpu_worker.weights import online
from services.gpu_worker.weights.gguf import GGUFSource
from services.gpu_worker.weights.quantization import WHERE, check_method
from services.gpu_worker.weights.safetensors import INDEX, QUANTIZATION, SINGLE, json_object
from shared.gguf_header import GGML_TYPES

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BITS = {name: 8 * num_bytes / elements for name, elements, num_bytes in GGML_TYPES.values()}
_NOT_QUANTISED = ("embedding", "head", "router", "shared_gate")


@dataclass(frozen=True, slots=True)
class Outlined:
    """native_type: as which native kernels hold a matrix; file_bits: what the file spends on an element.

    quantized_as is as in `WeightSource.quantized_as`."""

    place: str
    shape: tuple[int, ...]
    native_type: str
    file_bits: float
    quantized_as: str = ""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Outline:
    config: ModelConfig
    parameters: tuple[Outlined, ...]


@dataclass(frozen=True, slots=True)
class _Quantized:
    method: str
    native_type: str
    file_bits: float
    group: int = 0  # columns; 0: all of a row


def outline(path: Path, quantization: str = "none") -> Outline:
    """ConfigError or WeightsError as `open_source`; a folder need not have more than its config.json."""
    found = _of_folder(path) if path.is_dir() else _of_gguf(GGUFSource(path))
    if quantization == "none":
        return found
    return replace(found, parameters=tuple(_quantized_online(p, quantization) for p in found.parameters))


def _quantized_online(parameter: Outlined, method: str) -> Outlined:
    place, columns = parameter.place, parameter.shape[-1]
    if not online.is_quantized(place) or not online.check_stored(place, parameter.quantized_as, method):
        return parameter
    online.check_columns(place, columns, method)
    bits = {"int8": _BITS["Q8_0"], "int4": _BITS["Q4_0"], "fp8": 8.0}[method]
    return replace(parameter, native_type=online.TYPES[method], file_bits=bits, quantized_as=method)


def _of_gguf(source: GGUFSource) -> Outline:
    types = {place: source.type_of(place) for place in source.shapes}
    held = {"IQ4_NL": "Q8_0"}
    return Outline(
        replace(source.config, tied="head.weight" not in types),
        tuple(
            Outlined(
                place, shape, held.get(types[place], types[place]), _BITS[types[place]], source.quantized_as(place)
            )
            for place, shape in source.shapes.items()
        ),
    )


def _of_folder(folder: Path) -> Outline:
    values = json_object(folder / "config.json")
    quantization = values.pop(QUANTIZATION, None)
    config = config_from_hf(values)
    quantized = _quantized(quantization) if quantization else None
    dense = _DTYPES.get(str(values.get("dtype") or values.get("torch_dtype") or "float32"), "F32")
    names, num_bytes = _files(folder)
    if names:
        config = replace(config, tied=not any(name.startswith("lm_head.") for name in names))
    shapes = dict(parameters(config))
    if quantized is None and num_bytes:  # a configuration may say another type than the files have
        dense = "F32" if num_bytes > 3 * sum(map(prod, shapes.values())) else dense if dense != "F32" else "BF16"
    return Outline(config, tuple(_outlined(place, shape, dense, quantized) for place, shape in shapes.items()))


def _outlined(place: str, shape: tuple[int, ...], dense: str, quantized: _Quantized | None) -> Outlined:
    if quantized is None or len(shape) < 2 or place.split(".")[-2] in _NOT_QUANTISED:
        return Outlined(place, shape, dense, _BITS[dense])
    held = quantized.native_type
    if (quantized.group or shape[1]) % GROUP or shape[1] % GROUP:
        held = "F16"
    return Outlined(place, shape, held, quantized.file_bits, quantized.method)


def _files(folder: Path) -> tuple[list[str], int]:
    """Names of the tensors and how many bytes they take; nothing where there are no weights."""
    if (folder / INDEX).is_file():
        index = json_object(folder / INDEX)
        size = Keys(index.get("metadata") or {}, f"{INDEX}: metadata.").take("total_size", int, 0)
        return list(index.get("weight_map") or {}), size
    if not (folder / SINGLE).is_file():
        return [], 0
    with open(folder / SINGLE, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        size = (folder / SINGLE).stat().st_size
        header = json.loads(file.read(min(header_bytes, size)))
    return [name for name in header if name != "__metadata__"], size - 8 - header_bytes


def _quantized(values: Mapping[str, Any]) -> _Quantized:
    check_method(values)
    method = values["quant_method"]
    if method in ("awq", "gptq"):
        return _packed(values, method, int(values["bits"]) if "bits" in values else 4)
    if method == "compressed-tensors":
        weights = next(iter(values["config_groups"].values()))["weights"]
        if values.get("format") == "pack-quantized":
            return _packed({"sym": weights.get("symmetric", True), **weights}, method, int(weights.get("num_bits", 4)))
        return _Quantized(method, "F16", 8.0)
    if method == "bitsandbytes" and values.get("load_in_4bit"):
        return _Quantized(method, "F16", 4.0 + (8.0 if values.get("bnb_4bit_use_double_quant") else 32.0) / 64)
    return _Quantized(method, "F16", 8.0)


def _packed(values: Mapping[str, Any], method: str, bits: int) -> _Quantized:
    """Codes with scales and zeros by group."""
    group = Keys(values, WHERE).take("group_size", int, 0)
    centred = method != "awq" and bool(values.get("sym", True))
    file_bits = bits + (16 + bits) / group if group > 0 else float(bits)
    held = {4: "Q4_0" if centred else "Q4_1", 8: "Q8_0" if centred else "F16"}.get(bits, "F16")
    if values.get("desc_act") or values.get("actorder") == "group":
        held = "F16"
    return _Quantized(method, held, file_bits, max(0, group))
