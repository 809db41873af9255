"""Launches of Triton kernels: on a device, in the interpreter, or on paper for the ahead-of-time compiler.

On paper means with tensors of the device "meta": `recorded` runs an op's entry point with them and returns what it
would have launched, so what is compiled ahead of time is what production launches, constant by constant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.dispatch import interpreted

KIB = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU, as far as kernels are laid out for it."""

    name: str
    backend: str  # Triton's: "cuda" or "hip"
    arch: int | str
    warp_size: int
    shared_bytes: int  # what one program may use

    @property
    def multiplies_by_warp(self) -> bool:
        """Operands and sums of a product lie in a warp's registers, which larger steps overflow."""
        return isinstance(self.arch, int) and self.arch < 90

    @property
    def rounds_computed_operands(self) -> bool:
        """Triton 3.7 multiplies float32 in tf32 here, whatever it is told, where an operand has been computed."""
        return isinstance(self.arch, int) and self.arch >= 100

    @property
    def multiplies_e4m3(self) -> bool:
        """AMD's 8-bit floats there are others."""
        return isinstance(self.arch, int) and self.arch >= 89


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * KIB),
        Target("sm_89", "cuda", 89, 32, 99 * KIB),
        Target("sm_90", "cuda", 90, 32, 227 * KIB),
        Target("sm_100", "cuda", 100, 32, 227 * KIB),
        Target("gfx942", "hip", "gfx942", 64, 64 * KIB),
    )
}
_FALLBACK = TARGETS["sm_90"]  # what the interpreter plays
_LITTLE_SHARED = (86, 120, 121)  # devices with as little shared memory as sm_89, whose neighbours have more


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything that it is compiled for. types: argument → Triton's name of its type."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: frozenset[str]  # arguments known to be multiples of 16: aligned pointers, most strides
    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CompileCase:
    """A call of an op as production makes it, on tensors of the device "meta".

    mma: target → the matrix instruction that must be among the compiled ones (see `kernels.aot`).
    """

    name: str
    call: Callable[[], object]
    mma: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Recorder:
    target: Target
    launches: list[Launch]


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def on_paper(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor for a compile case."""
    return torch.empty(shape, dtype=dtype, device="meta")


def recorded(call: Callable[[], object], target: Target) -> list[Launch]:
    """What the call launches on the target."""
    recorder = _Recorder(target, [])
    token = _recorder.set(recorder)
    try:
        call()
    finally:
        _recorder.reset(token)
    return recorder.launches


def target_of(x: torch.Tensor) -> Target:
    """What x's device is like; for tensors on paper, what is being recorded for."""
    recorder = _recorder.get()
    if recorder is not None:
        return recorder.target
    return _target_of_device(x.device.index) if x.is_cuda else _FALLBACK


@functools.cache
def _target_of_device(index: int) -> Target:
    """The target itself, or the newest one that is older than the device and has no more room."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return TARGETS["gfx942"]
    arch = properties.major * 10 + properties.minor
    if arch in _LITTLE_SHARED:
        return TARGETS["sm_89"]
    older = [t for t in TARGETS.values() if isinstance(t.arch, int) and t.arch <= arch]
    if not older:
        raise RuntimeError(f"{properties.name} (sm_{arch}) is too old: kernels are made for sm_80 and later")
    return older[-1]


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    *,
    num_warps: int,
    num_stages: int = 1,
    all_registers: bool = False,
    unfused: bool = False,
    one_mma: bool = False,
    **constants: Any,
) -> None:
    """args are the kernel's arguments in its order, constants its `tl.constexpr` parameters.

    all_registers: NVIDIA's compiler is not to spill a few of them so that more programs fit.
    unfused: no multiplication may become one operation with an addition.
    one_mma: AMD's matrix instruction is of one shape, and so adds in one order, whatever the tile's shape.
    """
    recorder = _recorder.get()
    options = {"num_warps": num_warps, "num_stages": num_stages}
    backend = recorder.target.backend if recorder is not None else "hip" if torch.version.hip else "cuda"
    if all_registers and backend == "cuda":
        options["maxnreg"] = 255
    if one_mma and backend == "hip":
        options["matrix_instr_nonkdim"] = 16
    if unfused and not interpreted():
        options["enable_fp_fusion"] = False
    if recorder is not None:
        recorder.launches.append(_on_paper(kernel, args, constants, options))
    elif all(grid):
        kernel[grid](*args, **constants, **options)


_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5", torch.bool: "i1",
}  # fmt: skip


def _on_paper(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, int]) -> Launch:
    """As Triton itself specialises a launch: on 1, on None, and on what 16 divides, but for what a kernel says varies.
    Allocations are aligned."""
    types: dict[str, str] = {}
    fixed = dict(constants)
    divisible = set()
    varying = {param.name for param in kernel.params if param.do_not_specialize}
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, torch.Tensor):
            types[name] = "*" + _TYPES[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                divisible.add(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value is None or (value == 1 and name not in varying):
            fixed[name] = value
        else:
            types[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0 and name not in varying:
                divisible.add(name)
    return Launch(kernel, types, fixed, frozenset(divisible), options)
