"""A model's weights as a Hugging Face folder: config.json and safetensors files, nothing quantised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.gpu_worker.model.families import HF_FAMILIES
from services.gpu_worker.model.hf_values import architecture, hf_values
from services.gpu_worker.weights.names import Names, hf_names, is_norm
from services.gpu_worker.weights.safetensors import INDEX, SINGLE
from services.gpu_worker.weights.source import WeightsError, WeightSource

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
MAX_SHARD_BYTES = 4 << 30

Told = Callable[[int, int], None]  # tensors written, tensors in all


def write_model(source: WeightSource, folder: Path, dtype: str, told: Told) -> None:
    """Into an empty folder. ConfigError or WeightsError for what such a folder cannot say."""
    tied = "head.weight" not in source.shapes
    family = HF_FAMILIES[architecture(source.family, source.config)]
    values = hf_values(source.config, family, str(DTYPES[dtype]).removeprefix("torch."))
    values["tie_word_embeddings"] = tied
    names = hf_names(family, source.config)
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = 0
    for name, tensor in _tensors(source, names, family.norm_offset, DTYPES[dtype], told):
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append(_save(shard, folder, len(shards) + 1))
            shard = {}
        shard[name] = tensor
        total += tensor.nbytes
    shards.append(_save(shard, folder, len(shards) + 1))
    _name_shards(folder, shards, total)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _tensors(
    source: WeightSource, names: Names, norm_offset: float, dtype: torch.dtype, told: Told
) -> Iterator[tuple[str, torch.Tensor]]:
    done: set[str] = set()
    for number, place in enumerate(source.shapes):
        name = names.name(place)
        told(number + 1, len(source.shapes))
        if name in done:
            continue
        done.add(name)
        places = names.places(name)
        if not places:
            raise WeightsError(f"tensor {source.file_name(place)!r} has no place in the other format")
        yield name, torch.cat([_read(source, p, norm_offset, dtype) for p in places])


def _read(source: WeightSource, place: str, norm_offset: float, dtype: torch.dtype) -> torch.Tensor:
    if place not in source.shapes:
        raise WeightsError(f"tensor {source.file_name(place)!r} is missing")
    tensor = torch.empty(source.shapes[place])
    source.read_into(place, tensor)
    source.release(place)
    if norm_offset and is_norm(place):
        tensor -= norm_offset
    stored = tensor.to(dtype)
    if not stored.isfinite().all():
        raise WeightsError(f"tensor {source.file_name(place)!r}: a value is not finite, or beyond what {dtype} holds")
    return stored


def _save(shard: dict[str, torch.Tensor], folder: Path, number: int) -> list[str]:
    save_file(shard, folder / _shard_name(number), metadata={"format": "pt"})
    return list(shard)


def _shard_name(number: int, count: int | None = None) -> str:
    return f"model-{number:05}.part" if count is None else f"model-{number:05}-of-{count:05}.safetensors"


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / _shard_name(1)).rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, tensor_names in enumerate(shards, 1):
        name = _shard_name(number, len(shards))
        (folder / _shard_name(number)).rename(folder / name)
        weight_map |= dict.fromkeys(tensor_names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
