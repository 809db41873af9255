"""What a model's weights are without reading them: every parameter with its type, from config.json or a GGUF header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from kernels.packed_weight import GROUP
from services.gpu_worker.model.config import Keys, ModelConfig
from services.gpu_worker.model.hf_config import config_from_hf
from services.gpu_worker.model.parameters import parameters
from services.gpu_worker.weights import online
from services.gpu_worker.weights.device_bytes import Form, Grouping, Scaling, device_bytes
from services.gpu_worker.weights.gguf import GGUFSource
from services.gpu_worker.weights.quantization import WHERE, check_method
from services.gpu_worker.weights.safetensors import INDEX, QUANTIZATION, SINGLE, json_object

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ROWS_OF_FP8 = Scaling(torch.float8_e4m3fn, 0)
_FLOATS_ON_GPU = ("router", "shared_gate", "kv_b", "k_b", "v_b")
_NOT_QUANTISED = ("embedding", "head", "router", "shared_gate")


@dataclass(frozen=True, slots=True)
class Outlined:
    """native_type: as which native kernels hold a matrix; form: as which a GPU's products take it.

    quantized_as is as in `WeightSource.quantized_as`."""

    place: str
    shape: tuple[int, ...]
    native_type: str
    form: Form = None
    quantized_as: str = ""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Outline:
    config: ModelConfig
    parameters: tuple[Outlined, ...]

    def device_bytes(self, dtype: torch.dtype) -> int:
        """Of all on a GPU that computes in dtype, as `OnDevice` keeps them."""
        return sum(
            device_bytes(None if p.place.split(".")[-2] in _FLOATS_ON_GPU else p.form, p.shape, dtype)
            for p in self.parameters
        )


@dataclass(frozen=True, slots=True)
class _Quantized:
    method: str
    native_type: str
    form: Form
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
    form = _ROWS_OF_FP8 if method == "fp8" else online.TYPES[method]
    return replace(parameter, native_type=online.TYPES[method], form=form, quantized_as=method)


def _of_gguf(source: GGUFSource) -> Outline:
    types = {place: source.type_of(place) for place in source.shapes}
    held = {"IQ4_NL": "Q8_0"}

    def outlined(place: str, shape: tuple[int, ...]) -> Outlined:
        native_type, quantized_as = held.get(types[place], types[place]), source.quantized_as(place)
        return Outlined(place, shape, native_type, native_type if quantized_as else None, quantized_as)

    return Outline(
        replace(source.config, tied="head.weight" not in types),
        tuple(outlined(place, shape) for place, shape in source.shapes.items()),
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
        return Outlined(place, shape, dense)
    held = quantized.native_type
    if (quantized.group or shape[1]) % GROUP or shape[1] % GROUP:
        held = "F16"
    return Outlined(place, shape, held, quantized.form, quantized.method)


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
        return _compressed(values)
    if method == "bitsandbytes":
        return _Quantized(method, "F16", None if values.get("load_in_4bit") else Grouping(8, 0, True))
    block = values.get("weight_block_size")
    return _Quantized(method, "F16", replace(_ROWS_OF_FP8, group=block[1]) if block else _ROWS_OF_FP8)


def _compressed(values: Mapping[str, Any]) -> _Quantized:
    method, group = values["quant_method"], next(iter(values["config_groups"].values()))
    weights = group["weights"]
    columns, centred = Keys(weights, WHERE).take("group_size", int, 0), bool(weights.get("symmetric", True))
    if values["format"] == "pack-quantized":
        return _packed({"sym": centred, **weights}, method, int(weights.get("num_bits", 4)))
    block = weights.get("block_structure")
    columns = max(0, block[1] if block else columns)
    if values["format"] == "float-quantized" or weights.get("type") == "float":
        return _Quantized(method, "F16", replace(_ROWS_OF_FP8, group=columns))
    as_bytes = centred and group.get("input_activations") is not None
    return _Quantized(method, "F16", Scaling(torch.int8, columns) if as_bytes else Grouping(8, columns, centred))


def _packed(values: Mapping[str, Any], method: str, bits: int) -> _Quantized:
    """Codes with scales and zeros by group."""
    group = max(0, Keys(values, WHERE).take("group_size", int, 0))
    centred = method != "awq" and bool(values.get("sym", True))
    in_order = not values.get("desc_act") and values.get("actorder") != "group"
    held = {4: "Q4_0" if centred else "Q4_1", 8: "Q8_0" if centred else "F16"}.get(bits, "F16")
    return _Quantized(method, held if in_order else "F16", Grouping(bits, group, centred, in_order), group)
