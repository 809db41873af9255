"""A Hugging Face folder as a `WeightSource`: config.json with one or several safetensors files, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.packed_weight import Codes
from services.gpu_worker.model.hf_config import config_from_hf, hf_family
from services.gpu_worker.weights.awq import AWQMatrix
from services.gpu_worker.weights.compressed import PackedMatrix
from services.gpu_worker.weights.device_codes import coded
from services.gpu_worker.weights.gptq import GPTQMatrix
from services.gpu_worker.weights.names import has_bias, hf_names, is_norm, place_parts
from services.gpu_worker.weights.native_codes import Grouped, codes_of, codes_type
from services.gpu_worker.weights.quantization import readable_tensors
from services.gpu_worker.weights.source import CHUNK_BYTES, Coded, WeightsError, file_identity
from services.gpu_worker.weights.stored_tensors import StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZATION = "quantization_config"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
_INERT = ("rotary_emb.inv_freq",)  # buffers of old checkpoints; the configuration says the same


class SafetensorsSource:
    def __init__(self, folder: Path) -> None:
        values = json_object(folder / "config.json")
        quantization = values.pop(QUANTIZATION, None)
        if quantization is not None and not isinstance(quantization, dict):
            raise WeightsError(f"{folder / 'config.json'}: {QUANTIZATION} is not an object")
        self.family, self.config = hf_family(values), config_from_hf(values)
        self._norm_offset = self.family.norm_offset
        paths = shard_paths(folder)
        stored = tensors_in(paths)
        for number in range(_num_draft_layers(values)):
            prefix = f"model.layers.{self.config.num_layers + number}."
            stored = {name: tensor for name, tensor in stored.items() if not name.startswith(prefix)}
        self._tensors = readable_tensors(quantization, stored)
        self._method = str(quantization["quant_method"]) if quantization else ""
        self._codes_types: dict[str, str] = {}
        names = hf_names(self.family, self.config)
        self.file_name = names.name
        self._parts = place_parts(names, self.config, {name: t.shape for name, t in self._tensors.items()})
        if quantization:
            self._parts = {place: part for place, part in self._parts.items() if not self._says_nothing(place)}
        self.shapes = {place: part.shape for place, part in self._parts.items()}
        self.identity = folder_identity(folder)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        row_bytes = 4 * max(1, out[0].numel())
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, out.shape[0], step):
            out[start : start + step] = self._rows(name, start, min(out.shape[0], start + step))
        if self._norm_offset and is_norm(name):
            out += self._norm_offset

    def stored(self, name: str, start: int, end: int) -> Codes | torch.Tensor:
        """What is quantised comes as codes where there is a type for them, else as float16 if that holds it."""
        part = self._parts[name]
        tensor = self._tensors[part.name]
        if isinstance(tensor, AWQMatrix | GPTQMatrix | PackedMatrix) and (
            type_name := self._codes_type(part.name, tensor)
        ):
            return codes_of(tensor.groups(part.first_row + start, part.first_row + end), type_name)
        rows = self._rows(name, start, end)
        if isinstance(tensor, StoredTensor):
            return rows
        half = rows.half()
        return half if bool(half.isfinite().all()) else rows.contiguous()

    def coded(self, name: str) -> Coded | None:
        part = self._parts[name]
        return coded(self._tensors[part.name], part.first_row, part.first_row + part.shape[0])

    def quantized_as(self, name: str) -> str:
        return "" if isinstance(self._tensors[self._parts[name].name], StoredTensor) else self._method

    def release(self, name: str) -> None:
        """The reader copies; what it has mapped is the system's to take back."""

    def _says_nothing(self, place: str) -> bool:
        """A bias that the model does not have, of zeros: tools for GPTQ wrote one for every matrix."""
        shape = self._parts[place].shape
        if not place.endswith(".bias") or has_bias(place, self.config) or len(shape) != 1:
            return False
        return not bool(self._rows(place, 0, shape[0]).any())

    def _codes_type(self, name: str, matrix: Grouped) -> str:
        if name not in self._codes_types:
            self._codes_types[name] = codes_type(matrix)
        return self._codes_types[name]

    def _rows(self, name: str, start: int, end: int) -> torch.Tensor:
        part = self._parts[name]
        return self._tensors[part.name].rows(part.first_row + start, part.first_row + end)


def _num_draft_layers(values: dict[str, Any]) -> int:
    """Layers past the last that foresee further tokens: nothing follows from them here."""
    number = values.get("num_nextn_predict_layers")
    return number if type(number) is int and 0 <= number < 16 else 0


def tensors_in(paths: list[Path]) -> dict[str, StoredTensor]:
    """By name; WeightsError for a file that cannot be trusted."""
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        shard = _open(path)
        _refuse_doubles(path)
        for name in shard.keys():  # noqa: SIM118 - not a dict
            if name.endswith(_INERT):
                continue
            if name in tensors:
                raise WeightsError(f"{path.name}: tensor {name!r} is in another file too")
            view = shard.get_slice(name)
            tensors[name] = StoredTensor(name, view.get_dtype(), tuple(view.get_shape()), view)
    return tensors


def _refuse_doubles(path: Path) -> None:
    """Of two entries with one name the library takes either, in silence."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            doubled = next(name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1)
            raise WeightsError(f"{path.name}: {doubled!r} is there twice")
        return values

    with open(path, "rb") as file:
        header = file.read(_header_bytes(path))[8:]
    json.loads(header, object_pairs_hook=unique)  # the library has read it as JSON before


def folder_identity(folder: Path) -> str:
    """Of files that can be opened."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in shard_paths(folder):
        digest.update(file_identity(path, _header_bytes(path)))
    return digest.hexdigest()


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files of the folder, in a fixed order; an index may only name files beside it."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    weight_map = json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{INDEX}: no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not _PLAIN_NAME.fullmatch(name):
            raise WeightsError(f"{INDEX}: {name!r} is not the name of a file beside it")
        if not (folder / name).is_file():
            raise WeightsError(f"{INDEX}: {name} is missing")
    return [folder / name for name in names]


def json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise WeightsError(f"{path}: {e}") from e
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not an object")
    return value


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as e:
        raise WeightsError(f"{path}: {e}") from e


def _header_bytes(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")  # safe_open has found it to lie within the file
