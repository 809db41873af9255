"""A Hugging Face folder as a `WeightSource`: config.json with one or several safetensors files, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.gpu_worker.model.hf_config import config_from_hf, hf_family
from services.gpu_worker.weights.names import hf_names, is_norm, place_parts
from services.gpu_worker.weights.source import CHUNK_BYTES, WeightsError, file_identity

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
_INERT = ("rotary_emb.inv_freq",)  # buffers of old checkpoints; the configuration says the same


class SafetensorsSource:
    def __init__(self, folder: Path) -> None:
        values = _json_object(folder / "config.json")
        family, self.config = hf_family(values), config_from_hf(values)
        self._norm_offset = family.norm_offset
        shards = {path: _open(path) for path in shard_paths(folder)}
        self._shard_of: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path, shard in shards.items():
            for name in shard.keys():  # noqa: SIM118 - not a dict
                if name.endswith(_INERT):
                    continue
                if name in self._shard_of:
                    raise WeightsError(f"{path.name}: tensor {name!r} is in another file too")
                view = shard.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise WeightsError(f"tensor {name!r}: {view.get_dtype()} is not supported (known: {DTYPES})")
                self._shard_of[name] = shard
                shapes[name] = tuple(view.get_shape())
        names = hf_names(family, self.config)
        self.file_name = names.name
        self._parts = place_parts(names, self.config, shapes)
        self.shapes = {place: part.shape for place, part in self._parts.items()}
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in shards:
            digest.update(file_identity(path, _header_bytes(path)))
        self.identity = digest.hexdigest()

    def read_into(self, name: str, out: torch.Tensor) -> None:
        row_bytes = 4 * max(1, out[0].numel())
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, out.shape[0], step):
            out[start : start + step] = self.stored(name, start, min(out.shape[0], start + step))
        if self._norm_offset and is_norm(name):
            out += self._norm_offset

    def stored(self, name: str, start: int, end: int) -> torch.Tensor:
        part = self._parts[name]
        view = self._shard_of[part.name].get_slice(part.name)
        rows: torch.Tensor = view[part.first_row + start : part.first_row + end]
        return rows

    def release(self, name: str) -> None:
        """The reader copies; what it has mapped is the system's to take back."""


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files of the folder, in a fixed order; an index may only name files beside it."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    weight_map = _json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{INDEX}: no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not _PLAIN_NAME.fullmatch(name):
            raise WeightsError(f"{INDEX}: {name!r} is not the name of a file beside it")
        if not (folder / name).is_file():
            raise WeightsError(f"{INDEX}: {name} is missing")
    return [folder / name for name in names]


def _json_object(path: Path) -> dict[str, Any]:
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
