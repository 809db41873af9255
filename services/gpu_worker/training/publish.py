"""Trained heads as a folder in the published layout: see `weights/head_files.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from kernels.packed_weight import GROUP
from services.gpu_worker.speculative.head_config import eagle_values, medusa_values
from services.gpu_worker.training.eagle import EagleHead
from services.gpu_worker.training.medusa import MedusaHeads
from services.gpu_worker.weights.head_files import CONFIG, INT4, packed_int4
from services.gpu_worker.weights.safetensors import QUANTIZATION, SINGLE

DTYPES = ("float16", "int4")


def publish(head: nn.Module, token_ids: torch.Tensor, folder: Path, dtype: str, notes: dict[str, str]) -> None:
    """token_ids: of the draft vocabulary. dtype: of matrices; notes: what is to be said in the file's header."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _floats(head).items():
        if dtype == "int4" and tensor.dim() == 2 and tensor.shape[1] % GROUP == 0:
            tensors |= packed_int4(name, tensor)
        else:
            tensors[name] = tensor.half().contiguous()
    values: dict[str, Any]
    if isinstance(head, MedusaHeads):
        values = medusa_values(head.config)
        if head.config.draft_vocab_size < head.config.vocab_size:
            tensors["token_map"] = token_ids
    else:
        assert isinstance(head, EagleHead)
        values = eagle_values(head.config)
        if head.config.is_fused:
            drafted = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool)
            drafted[token_ids] = True
            tensors |= {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": drafted}
    if dtype == "int4":
        values[QUANTIZATION] = INT4
    save_file(tensors, folder / SINGLE, metadata={"format": "pt", **notes})
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


def _floats(head: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach().float() for name, tensor in head.named_parameters()}
    if isinstance(head, EagleHead):
        found["fc.weight"] = found["fc.weight"] * head.get_buffer("scale")
    return found
