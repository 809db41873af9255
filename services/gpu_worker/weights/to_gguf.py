"""A model's weights as a GGUF file, in llama.cpp's names and order of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.packed_weight import DENSE, GROUP
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.model.gguf_config import config_from_gguf, with_rope_factors
from services.gpu_worker.model.gguf_values import gguf_family_of, gguf_values, rope_tensors
from services.gpu_worker.model.same_config import check_same
from services.gpu_worker.weights.gguf import halves_to_pairs
from services.gpu_worker.weights.gguf_writer import TensorHead, write_gguf
from services.gpu_worker.weights.names import Names, gguf_names
from services.gpu_worker.weights.quant_layout import encode
from services.gpu_worker.weights.quantizers import TYPES as QUANTIZED
from services.gpu_worker.weights.quantizers import quantize
from services.gpu_worker.weights.source import WeightsError, WeightSource

TYPES = (*DENSE, *QUANTIZED)
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}  # llama.cpp's
_STAYS_FLOAT = ("router", "shared_gate")
_ENDS = ("embedding.weight", "head.weight")  # whose 4 and 5 bits would show in every token

Told = Callable[[int, int], None]  # tensors written, tensors in all


@dataclass(frozen=True, slots=True)
class _Planned:
    head: TensorHead
    places: tuple[str, ...]  # whose rows it has, one after the other


def write_model(source: WeightSource, path: Path, type_name: str, tokenizer: Mapping[str, Any], told: Told) -> None:
    """type_name is of matrices; those whose rows are no whole blocks become float16. ConfigError or WeightsError for
    what a GGUF file cannot say."""
    if type_name not in TYPES:
        raise ConfigError(f"outtype: {type_name} is not supported (known: {', '.join(TYPES)})")
    arch, family = gguf_family_of(source.family)
    config = source.config
    planned = list(_plan(source, gguf_names(family, config), type_name))
    extra = rope_tensors(config)
    values = gguf_values(config, arch, family)
    shapes = {p.head.name: p.head.shape for p in planned}
    metadata = {"general.architecture": arch, "general.type": "model", "general.name": path.stem,
                "general.file_type": _FILE_TYPES[type_name], "general.quantization_version": 2,
                **values, **tokenizer}  # fmt: skip
    found = with_rope_factors(config_from_gguf(metadata, shapes), {n: tuple(t.tolist()) for n, t in extra.items()})
    check_same(config, found, "a GGUF file")
    heads = [*(TensorHead(name, tuple(t.shape), "F32") for name, t in extra.items()), *(p.head for p in planned)]

    def data() -> Iterator[Iterator[bytes]]:
        for tensor in extra.values():
            yield iter((_bytes(tensor, "F32"),))
        for number, p in enumerate(planned):
            yield _data(source, p, family.gguf_pairs)
            told(number + 1, len(planned))

    write_gguf(path, metadata, heads, data())


def _plan(source: WeightSource, names: Names, type_name: str) -> Iterator[_Planned]:
    done: set[str] = set()
    for place in source.shapes:
        name = names.name(place)
        if name in done:
            continue
        done.add(name)
        places = names.places(name)
        if not places:
            raise WeightsError(f"tensor {source.file_name(place)!r} has no place in the other format")
        if missing := [p for p in places if p not in source.shapes]:
            raise WeightsError(f"tensor {source.file_name(missing[0])!r} is missing")
        yield _Planned(TensorHead(name, _shape(source, places, name), _type(source, place, type_name)), places)


def _shape(source: WeightSource, places: tuple[str, ...], name: str) -> tuple[int, ...]:
    shapes = [source.shapes[place] for place in places]
    if name.endswith("_exps.weight"):
        return (len(shapes), *shapes[0])
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _type(source: WeightSource, place: str, wanted: str) -> str:
    shape = source.shapes[place]
    if len(shape) < 2 or place.split(".")[-2] in _STAYS_FLOAT:
        return "F32"
    if wanted in QUANTIZED and shape[1] % GROUP:
        return "F16"
    return "Q8_0" if wanted in QUANTIZED and place in _ENDS else wanted


def _data(source: WeightSource, planned: _Planned, in_pairs: bool) -> Iterator[bytes]:
    for place in planned.places:
        tensor = torch.empty(source.shapes[place])
        source.read_into(place, tensor)
        source.release(place)
        if in_pairs and place.split(".")[-2] in ("q", "k"):
            tensor = halves_to_pairs(tensor, source.config.head_dim)
        if not tensor.isfinite().all():
            raise WeightsError(f"tensor {source.file_name(place)!r}: a value is not finite")
        yield _bytes(tensor, planned.head.type_name)


def _bytes(tensor: torch.Tensor, type_name: str) -> bytes:
    if type_name in DENSE:
        stored = tensor.to(DENSE[type_name])
        if not stored.isfinite().all():
            raise WeightsError(f"a value is beyond what {type_name} holds: another outtype is needed")
        data = stored.contiguous().view(torch.uint8)
    else:
        data = encode(quantize(tensor, type_name))
    return data.numpy().tobytes()
