"""Quantised Hugging Face folders, packed number by number: of random codes, so that what they mean is known exactly.

Every writer returns a layer's tensors and the matrix that they stand for, computed here from the codes alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

Written = tuple[dict[str, torch.Tensor], np.ndarray[Any, Any]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds
GROUP = 32


def pack(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """[count, columns] -> int32 words along the first axis: every column one long little-endian number."""
    words = -(-len(values) * bits // 32)
    out = np.zeros((words, values.shape[1]), dtype=np.uint32)
    for column in range(values.shape[1]):
        number = sum(int(value) << (bits * i) for i, value in enumerate(values[:, column]))
        for word in range(words):
            out[word, column] = (number >> (32 * word)) & 0xFFFFFFFF
    return out.view(np.int32)


def numbers(generator: np.random.Generator, high: int, *shape: int) -> np.ndarray[Any, Any]:
    return generator.integers(0, high, shape)


def scales_of(generator: np.random.Generator, *shape: int, bits: int = 4) -> np.ndarray[Any, Any]:
    return (generator.uniform(0.16, 0.8, shape) / 2**bits).astype(np.float16)


def awq(generator: np.random.Generator, rows: int, columns: int) -> Written:
    q, z = numbers(generator, 16, columns, rows), numbers(generator, 16, columns // GROUP, rows)
    s = scales_of(generator, columns // GROUP, rows)

    def words(values: np.ndarray[Any, Any]) -> torch.Tensor:
        out = np.zeros((len(values), rows // 8), dtype=np.uint32)
        for i, column in enumerate(AWQ_ORDER):
            out |= values[:, column::8].astype(np.uint32) << np.uint32(4 * i)
        return torch.from_numpy(out.view(np.int32))

    group = np.arange(columns) // GROUP
    tensors = {"qweight": words(q), "qzeros": words(z), "scales": torch.from_numpy(s)}
    return tensors, ((q - z[group]) * s[group].astype(np.float64)).T


def gptq(bits: int, version: int = 1, symmetric: bool = False, act_order: bool = False) -> Callable[..., Written]:
    def write(generator: np.random.Generator, rows: int, columns: int) -> Written:
        q = numbers(generator, 1 << bits, columns, rows)
        z = numbers(generator, 1 << bits, columns // GROUP, rows)
        if symmetric:
            z[:] = 1 << (bits - 1)
        s = scales_of(generator, columns // GROUP, rows, bits=bits)
        group = np.arange(columns) // GROUP
        if act_order:
            group = generator.permutation(group)
        stored = (z - 1) % (1 << bits) if version == 1 else z
        tensors = {
            "qweight": torch.from_numpy(pack(q, bits)), "qzeros": torch.from_numpy(pack(stored.T, bits).T.copy()),
            "scales": torch.from_numpy(s), "g_idx": torch.from_numpy(group.astype(np.int32)),
        }  # fmt: skip
        if symmetric:  # as files of that kind have it
            tensors["bias"] = torch.zeros(rows, dtype=torch.float16)
        return tensors, ((q - z[group]) * s[group].astype(np.float64)).T

    return write


def compressed(bits: int, groups: bool = True, zeros: bool = False, act_order: bool = False) -> Callable[..., Written]:
    def write(generator: np.random.Generator, rows: int, columns: int) -> Written:
        num_groups = columns // GROUP if groups else 1
        q = numbers(generator, 1 << bits, rows, columns)
        z = numbers(generator, 1 << bits, rows, num_groups) if zeros else np.full((rows, num_groups), 1 << (bits - 1))
        s = scales_of(generator, rows, num_groups, bits=bits)
        group = np.arange(columns) // (columns // num_groups)
        if act_order:
            group = generator.permutation(group)
        tensors = {
            "weight_packed": torch.from_numpy(pack(q.T, bits).T.copy()), "weight_scale": torch.from_numpy(s),
            "weight_shape": torch.tensor([rows, columns]),
        }  # fmt: skip
        if zeros:
            tensors["weight_zero_point"] = torch.from_numpy(pack(z, bits))
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        return tensors, (q - z[:, group]) * s[:, group].astype(np.float64)

    return write


def scaled(kind: str, scale: str, name: str = "weight_scale") -> Callable[..., Written]:
    """scale: tensor, channel, or block (of 32 x 48, so that the last ones are cut)."""

    def write(generator: np.random.Generator, rows: int, columns: int) -> Written:
        high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (32, 48)}[scale]
        parts = (-(-rows // high), -(-columns // wide))
        s = generator.uniform(0.001, 0.003, parts).astype(np.float32)
        if kind == "int8":
            codes = torch.from_numpy(numbers(generator, 256, rows, columns).astype(np.uint8)).view(torch.int8)
        else:
            codes = torch.from_numpy(generator.normal(0, 40, (rows, columns)).astype(np.float32)).to(
                torch.float8_e4m3fn
            )
        values = codes.float().numpy().astype(np.float64)
        spread = s.repeat(high, 0).repeat(wide, 1)[:rows, :columns]
        shape = {"tensor": (), "channel": (rows, 1), "block": parts}[scale]
        return {"weight": codes, name: torch.from_numpy(s).reshape(shape)}, values * spread

    return write


NF4 = np.sort(np.random.default_rng(7).uniform(-1, 1, 16)).astype(np.float32)  # the file brings the table


def nf4(nested: bool) -> Callable[..., Written]:
    def write(generator: np.random.Generator, rows: int, columns: int) -> Written:
        q = numbers(generator, 16, rows * columns)
        count = rows * columns // 64
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, columns]}
        tensors = {
            "weight": torch.from_numpy((q[0::2] << 4 | q[1::2]).astype(np.uint8))[:, None],
            "weight.quant_map": torch.from_numpy(NF4.copy()),
        }
        if nested:
            codes, table = numbers(generator, 256, count), np.linspace(-1, 1, 256).astype(np.float32)
            largest = generator.uniform(0.05, 0.1, -(-count // 256)).astype(np.float32)
            absmax = table[codes] * largest[np.arange(count) // 256].astype(np.float64) + 0.25
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            tensors |= {
                "weight.absmax": torch.from_numpy(codes.astype(np.uint8)),
                "weight.nested_quant_map": torch.from_numpy(table),
                "weight.nested_absmax": torch.from_numpy(largest),
            }
        else:
            absmax = generator.uniform(0.1, 0.4, count).astype(np.float32)
            tensors["weight.absmax"] = torch.from_numpy(absmax)
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return tensors, (NF4[q].astype(np.float64) * absmax.repeat(64)).reshape(rows, columns)

    return write


def int8_rows(generator: np.random.Generator, rows: int, columns: int) -> Written:
    q = numbers(generator, 255, rows, columns) - 127
    largest = generator.uniform(0.2, 0.6, rows).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy(q.astype(np.int8)), "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip
    return tensors, q * (largest.astype(np.float64) / 127)[:, None]


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", **group(num_bits=4, type="int")}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Written]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    **{f"gptq-{bits}": (GPTQ | {"bits": bits}, gptq(bits)) for bits in (2, 3, 4, 8)},
    **{f"gptq-{b}-v2": (GPTQ | {"bits": b, "checkpoint_format": "gptq_v2"}, gptq(b, 2)) for b in (2, 3, 4, 8)},
    "gptq-format": (GPTQ | {"bits": 4, "format": "gptq_v2"}, gptq(4, 2)),
    "gptq-act-order": (GPTQ | {"bits": 4, "desc_act": True}, gptq(4, act_order=True)),
    "gptq-symmetric": (GPTQ | {"bits": 4, "sym": True}, gptq(4, symmetric=True)),
    "gptq-mislabelled": (GPTQ | {"bits": 4, "sym": True, "checkpoint_format": "gptq"}, gptq(4, 2, symmetric=True)),
    "packed-4": (PACKED, compressed(4)),
    "packed-4-zeros": (PACKED, compressed(4, zeros=True)),
    "packed-4-act-order": (PACKED, compressed(4, act_order=True)),
    "packed-8-channel": (
        PACKED | {"sparsity_config": {"format": "dense"}, **group(num_bits=8, type="int", strategy="channel")},
        compressed(8, groups=False),
    ),
    "int-quantized": (PACKED | {"format": "int-quantized"}, scaled("int8", "channel")),
    "float-quantized": (PACKED | {"format": "float-quantized"}, scaled("fp8", "channel")),
    "float-blocks": (
        PACKED | {"format": "float-quantized", **group(num_bits=8, strategy="block", block_structure=[32, 48])},
        scaled("fp8", "block"),
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, scaled("fp8", "tensor")),
    "fp8-channel": ({"quant_method": "fbgemm_fp8"}, scaled("fp8", "channel")),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [32, 48]}, scaled("fp8", "block", "weight_scale_inv"),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(nested=False)),
    "nf4-nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(nested=True)),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_rows),
}  # fmt: skip


def quantize(model: transformers.PreTrainedModel, folder: Path, name: str) -> None:
    """Puts random codes in place of the projections' weights, in the folder and, as what they mean, in the model."""
    config, write = FORMATS[name]
    generator = np.random.default_rng(1)
    tensors: dict[str, torch.Tensor] = {}
    for tensor_name, parameter in model.state_dict().items():
        if "_proj." not in tensor_name:
            tensors[tensor_name] = parameter
            continue
        stem = tensor_name.removesuffix(".weight")
        parts, matrix = write(generator, *parameter.shape)
        parameter.copy_(torch.from_numpy(matrix))
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        if config["quant_method"] == "fp8":
            tensors[f"{stem}.input_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": config}))
