"""A folder with a head that drafts: config.json and safetensors files, in the layouts in which they are published.

EAGLE-3: fc, midlayer.* (vLLM's tools: layers.0.*), norm, lm_head, d2t (of each draft token, how far its id in the
target's vocabulary is from its own), t2d (is a token of the target drafted?). EAGLE-1 and -2: fc and layers.0.*; output
head and, where it is missing, embedding are the target's. Medusa: blocks.I.layers.J, lm_heads.I and token_map as vLLM
has them, or I.J.linear and I.LAST as FasterDecoding does. Sources: SafeAILab/EAGLE (`eagle/model/cnets.py`,
`cnets1.py`), vllm-project/vllm (`llama_eagle.py`, `llama_eagle3.py`, `medusa.py`), FasterDecoding/Medusa
(`medusa/model/medusa_model.py`). Pickled files, which some of them have beside, are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kernels.matmul import prepare
from kernels.packed_weight import GROUP, TILE_ROWS, PackedWeight, pack, pack_dense, packed_bytes
from services.gpu_worker.model.config import NotNativeError
from services.gpu_worker.weights.awq import AWQMatrix
from services.gpu_worker.weights.compressed import PackedMatrix
from services.gpu_worker.weights.device_codes import coded
from services.gpu_worker.weights.gptq import GPTQMatrix
from services.gpu_worker.weights.native_codes import codes_of, codes_type
from services.gpu_worker.weights.quantization import readable_tensors
from services.gpu_worker.weights.quantizers import quantize
from services.gpu_worker.weights.safetensors import INDEX, QUANTIZATION, SINGLE, json_object, shard_paths, tensors_in
from services.gpu_worker.weights.source import Coded, WeightsError
from services.gpu_worker.weights.stored_tensors import Readable

CONFIG = "config.json"
MEDUSA_FILE = "medusa_lm_head.safetensors"
_NOT_FLOATS = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8"), "token_map": ("I64", "I32")}
FEW_ROWS = 16  # that tell what all take
FLOATS_AS = "Q8_0"  # what a head computes is a guess: speed counts more than its last bits


class HeadFiles:
    """Each tensor is to be taken once, with the shape that it must have; `finish` refuses those nobody took."""

    def __init__(self, folder: Path) -> None:
        self.values = json_object(folder / CONFIG)
        quantization = self.values.pop(QUANTIZATION, None)
        if quantization is not None and not isinstance(quantization, dict):
            raise WeightsError(f"{folder / CONFIG}: {QUANTIZATION} is not an object")
        stored = tensors_in(_paths(folder))
        self._numbers = {name: stored.pop(name) for name in _NOT_FLOATS if name in stored}
        self._tensors: dict[str, Readable] = readable_tensors(quantization, stored)

    def has(self, name: str) -> bool:
        return name in self._tensors or name in self._numbers

    def names(self) -> list[str]:
        return list(self._tensors)

    def rename(self, old: str, new: str) -> None:
        """Of a beginning: another layout's."""
        self._tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in self._tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Of all matrices that are left, as they will lie in memory."""
        return sum(packed_bytes(_held_as(n, t), *t.shape) for n, t in self._tensors.items() if len(t.shape) == 2)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """float32, with zeros up to a multiple of 16."""
        out = torch.zeros(-(-size // TILE_ROWS) * TILE_ROWS)
        out[:size] = self._take(name, (size,)).rows(0, size)
        return out

    def matrix(self, name: str, rows: int, columns: int) -> PackedWeight:
        """Codes stay what they are, floats become codes."""
        tensor = self._take(name, (rows, columns))
        if columns % GROUP:
            raise NotNativeError(f"tensor {name!r}: {columns} columns are not whole groups of {GROUP}")
        if isinstance(tensor, AWQMatrix | GPTQMatrix | PackedMatrix) and (type_name := codes_type(tensor)):
            return pack(codes_of(tensor.groups(0, rows), type_name))
        values = tensor.rows(0, rows).float()
        if not values.isfinite().all():
            raise WeightsError(f"tensor {name!r}: a value is not finite")
        return pack(quantize(values, FLOATS_AS))

    def stored(self, name: str, rows: int, columns: int) -> Coded | torch.Tensor:
        """As products on a GPU take it: codes, or floats."""
        return _stored(name, self._take(name, (rows, columns)), rows)

    def device_bytes(self, dtype: torch.dtype) -> int:
        """Of all matrices that are left, on a GPU that computes in dtype."""
        total = 0
        for name, tensor in self._tensors.items():
            if len(tensor.shape) == 2 and tensor.shape[0]:
                rows = min(tensor.shape[0], FEW_ROWS)
                total += prepare(_stored(name, tensor, rows), dtype, "cpu").num_bytes * tensor.shape[0] // rows
        return total

    def dense(self, name: str, rows: int, columns: int) -> PackedWeight:
        """As floats."""
        return pack_dense(self._take(name, (rows, columns)).rows(0, rows).half())

    def floats(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """float32, whatever they are stored as."""
        return self._take(name, shape).rows(0, shape[0]).float().reshape(shape)

    def numbers(self, name: str, size: int) -> torch.Tensor:
        """int64."""
        tensor = self._numbers.pop(name, None)
        if tensor is None or tensor.shape != (size,) or tensor.dtype not in _NOT_FLOATS[name]:
            found = "it is missing" if tensor is None else f"found {tensor.dtype} {tensor.shape}"
            raise WeightsError(f"tensor {name!r}: {' or '.join(_NOT_FLOATS[name])} ({size},) expected, {found}")
        return tensor.whole().long()

    def finish(self) -> None:
        if left := [*self._tensors, *self._numbers]:
            raise WeightsError(f"{len(left)} tensors have no place in this head: {', '.join(sorted(left)[:5])}")

    def _take(self, name: str, shape: tuple[int, ...]) -> Readable:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise WeightsError(f"tensor {name!r} is missing")
        if tensor.shape != shape:
            raise WeightsError(f"tensor {name!r}: shape {shape} expected, found {tensor.shape}")
        return tensor


def _stored(name: str, tensor: Readable, rows: int) -> Coded | torch.Tensor:
    """The first rows."""
    if (codes := coded(tensor, 0, rows)) is not None:
        return codes
    values = tensor.rows(0, rows).float()
    if not values.isfinite().all():
        raise WeightsError(f"tensor {name!r}: a value is not finite")
    return values


def _held_as(name: str, tensor: Readable) -> str:
    if isinstance(tensor, AWQMatrix | GPTQMatrix | PackedMatrix) and (type_name := codes_type(tensor)):
        return type_name
    return "F16" if name.startswith("embed_tokens.") else FLOATS_AS


def _paths(folder: Path) -> list[Path]:
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists() and (folder / MEDUSA_FILE).is_file():
        return [folder / MEDUSA_FILE]
    return shard_paths(folder)


def draft_token_ids(files: HeadFiles, draft_vocab_size: int, vocab_size: int) -> torch.Tensor | None:
    """int32: which tokens of the target an EAGLE-3 head drafts; None if they are the same."""
    if not files.has("d2t"):
        if draft_vocab_size != vocab_size:
            raise WeightsError("tensor 'd2t' is missing")
        return None
    ids = files.numbers("d2t", draft_vocab_size) + torch.arange(draft_vocab_size)
    _check_ids("d2t", ids, vocab_size)
    if files.has("t2d") and not bool(files.numbers("t2d", vocab_size)[ids].all()):
        raise WeightsError("tensor 't2d' says that a token of 'd2t' is not drafted")
    return ids.int()


def mapped_token_ids(files: HeadFiles, draft_vocab_size: int, vocab_size: int) -> torch.Tensor | None:
    """The same of Medusa heads."""
    if draft_vocab_size == vocab_size:
        return None
    ids = files.numbers("token_map", draft_vocab_size)
    _check_ids("token_map", ids, vocab_size)
    return ids.int()


def _check_ids(name: str, ids: torch.Tensor, vocab_size: int) -> None:
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise WeightsError(f"tensor {name!r}: a token is not one of the {vocab_size} of the model")


def packed_int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in compressed-tensors' format pack-quantized: 4 bits, symmetric, a scale for 32 columns."""
    codes = quantize(weight, "Q4_0")
    words = (codes.q.int().view(len(weight), -1, 8) << (4 * torch.arange(8, dtype=torch.int32))).sum(-1)
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.weight_packed": words.to(torch.int32), f"{stem}.weight_scale": codes.d,
        f"{stem}.weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip


INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
    }},
}  # fmt: skip
