"""Which quantisation a Hugging Face folder is stored in, and its matrices: by `quantization_config` and by the tensors.

What a checkpoint says of activations' scales is left out: where they are quantised they are row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.gpu_worker.model.config import ConfigError, Keys
from services.gpu_worker.weights.awq import AWQMatrix
from services.gpu_worker.weights.bitsandbytes import STATES, TableMatrix, int8_matrix
from services.gpu_worker.weights.compressed import PackedMatrix
from services.gpu_worker.weights.gptq import GPTQMatrix
from services.gpu_worker.weights.scaled import FP8, ScaledMatrix
from services.gpu_worker.weights.source import WeightsError
from services.gpu_worker.weights.stored_tensors import FLOATS, Module, Readable, StoredTensor

WHERE = "quantization_config."
_PARTS = sorted((
    "qweight", "qzeros", "scales", "g_idx", "weight", "weight_scale", "weight_scale_inv", "weight_packed",
    "weight_shape", "weight_zero_point", "weight_g_idx", "SCB", "weight_format", "weight.absmax", "weight.quant_map",
    "weight.nested_absmax", "weight.nested_quant_map", *STATES,
), key=len, reverse=True)  # fmt: skip
_MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "weight.absmax")
_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".input_zero_point")

Build = Callable[[Module], Readable]


def readable_tensors(config: Mapping[str, Any] | None, tensors: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    """The model's tensors by the names that they would have if nothing were quantised.

    ConfigError for a method that is not supported, WeightsError for a tensor that does not fit it.
    """
    if not config:
        return {name: _plain(tensor) for name, tensor in tensors.items()}
    build = _builder(config)
    readable: dict[str, Readable] = {}
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        stem, part = _split(name)
        if part:
            modules.setdefault(stem, {})[part] = tensor
        elif not name.endswith(_OF_ACTIVATIONS):
            readable[name] = _plain(tensor)
    for stem, parts in modules.items():
        if not any(mark in parts for mark in _MARKS):
            readable |= {f"{stem}.{part}": _plain(tensor) for part, tensor in parts.items()}
            continue
        module = Module(stem, parts)
        readable[f"{stem}.weight"] = build(module)
        for part in module.left():
            raise WeightsError(f"tensor {stem + '.' + part!r} has no place in this quantisation")
    return readable


def check_method(config: Mapping[str, Any]) -> None:
    """ConfigError as `readable_tensors`, from the configuration alone."""
    _builder(config)


def _plain(tensor: StoredTensor) -> StoredTensor:
    if tensor.dtype not in FLOATS:
        raise WeightsError(f"tensor {tensor.name!r}: {tensor.dtype} is not supported (known: {FLOATS})")
    return tensor


def _split(name: str) -> tuple[str, str]:
    """The module's name and the part, or the name and nothing."""
    for part in _PARTS:
        if name.endswith(f".{part}"):
            return name[: -len(part) - 1], part
    return name, ""


def _builder(config: Mapping[str, Any]) -> Build:
    keys = Keys(config, WHERE)
    method = keys.need("quant_method", str)
    if method not in _METHODS:
        raise ConfigError(f"{WHERE}quant_method: {method!r} is not supported (known: {', '.join(_METHODS)})")
    return _METHODS[method](keys)


def _awq(keys: Keys) -> Build:
    keys.expect("bits", 4)
    keys.expect("version", "gemm", "GEMM")
    keys.expect("zero_point", True)
    return AWQMatrix.of


def _gptq(keys: Keys) -> Build:
    bits, symmetric = keys.need("bits", int), keys.take("sym", bool, True)
    for rule in keys.take("dynamic", dict, {}):
        if not str(rule).startswith("-:"):  # those leave modules as they are, which their tensors show
            raise ConfigError(
                f"{WHERE}dynamic: {str(rule)[:100]!r} is not supported: one kind of codes for all modules"
            )
    names = ("checkpoint_format", "format")  # two for one
    for name in names:
        keys.expect(name, "gptq", "gptq_v2")
    version = 2 if "gptq_v2" in [keys.take(name, str) for name in names] else 1
    return lambda module: GPTQMatrix.of(module, bits, symmetric, version)


def _fp8(keys: Keys) -> Build:
    block = _block(keys.take("weight_block_size", list), "weight_block_size")
    return lambda module: ScaledMatrix.of(module, tuple(FP8), block)


def _compressed(keys: Keys) -> Build:
    keys.expect("format", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    Keys(keys.take("sparsity_config", dict, {}), f"{WHERE}sparsity_config.").expect("format", "dense")
    keys.expect("transform_config", {})
    blocks, activations = set(), True
    groups = Keys(keys.need("config_groups", dict), f"{WHERE}config_groups.")
    for name in keys.need("config_groups", dict):
        group = groups.need(name, dict)
        weights = Keys(group, f"{WHERE}config_groups.{name}.").need("weights", dict)
        activations = activations and group.get("input_activations") is not None
        blocks.add(_block(weights.get("block_structure"), "block_structure"))
    if len(blocks) != 1:
        raise ConfigError(f"{WHERE}config_groups: groups with different block_structure are not supported")
    block = blocks.pop()

    def build(module: Module) -> Readable:
        if module.has("weight_packed"):
            return PackedMatrix.of(module)
        return ScaledMatrix.of(module, ("I8", *FP8), block, activations)

    return build


def _bitsandbytes(keys: Keys) -> Build:
    return lambda module: int8_matrix(module) if module.has("SCB") else TableMatrix.of(module)


def _block(sizes: Any, key: str) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise ConfigError(f"{WHERE}{key}: two numbers expected, got {str(sizes)[:100]}")
    return sizes[0], sizes[1]


_METHODS: Mapping[str, Callable[[Keys], Build]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
