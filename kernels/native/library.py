"""The native ops as loaded from a shared library: functions with their types, and the pool of threads."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from kernels.native.structs import Chains, Layer, Matrix, Model, Rows, Step

# Not worth letting other Python threads in, who may be slow to leave.
_BRIEF = ("runner_submit", "runner_allow", "runner_has_ended")
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "pool_new": (c_void_p, [c_int]),
    "pool_free": (None, [c_void_p]),
    "runner_new": (c_void_p, [POINTER(Model), c_void_p]),
    "runner_free": (None, [c_void_p]),
    "runner_run": (c_int, [c_void_p, POINTER(Step)]),
    "runner_chains": (c_int, [c_void_p, POINTER(Chains)]),
    "runner_submit": (c_int64, [c_void_p, POINTER(Step)]),
    "runner_allow": (None, [c_void_p, POINTER(Step)]),
    "runner_has_ended": (c_int, [c_void_p, c_int64]),
    "runner_wait_until_late": (None, [c_void_p, c_int64]),
    "runner_wait": (c_int, [c_void_p, c_int64]),
    "product": (None, [c_void_p, POINTER(Matrix), POINTER(Rows), c_int, c_void_p, c_int64]),
    "quantize": (None, [POINTER(Rows), c_int]),
    "norm": (None, [c_void_p, c_void_p, c_float, c_int, c_int, c_int64, c_void_p]),
    "silu_mul": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int]),
    "weight_rows": (None, [POINTER(Matrix), POINTER(c_int32), c_int, c_void_p]),
    "rope": (None, [POINTER(Model), POINTER(Layer), POINTER(Step), c_void_p, c_int64, c_void_p]),
    "forbid": (None, [c_void_p, c_int, c_char_p, c_int]),
    "sample_scratch": (c_int64, [c_void_p, c_int, c_int]),
    "sample": (None, [c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p]),
    "move_slots": (None, [POINTER(Model), POINTER(c_int32), POINTER(c_int32), c_int]),
    "attend_scratch": (c_int64, [POINTER(Model)]),
    "attend": (None, [POINTER(Model), POINTER(Layer), POINTER(Step), c_void_p, c_void_p, c_void_p]),
}


class NativeLibrary:
    """`library.<name>` is the C function headrace_<name>; name says what was built, for the kernel variant."""

    def __init__(self, path: Path, name: str) -> None:
        """OSError if the file is not a library of this machine."""
        self.name = name
        self._dll, self._brief = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for function, (result, arguments) in _SIGNATURES.items():
            entry = getattr(self._brief if function in _BRIEF else self._dll, f"headrace_{function}")
            entry.restype, entry.argtypes = result, arguments
            setattr(self, function, entry)

    def __getattr__(self, name: str) -> Any:  # only for names that __init__ has not set
        raise AttributeError(f"there is no native function {name!r}")


class Pool:
    """Threads for one caller at a time, who counts as one of them."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self.pointer = None  # closing does nothing until there is a pool
        if not 1 <= num_threads <= 1024:
            raise ValueError(f"num_threads: {num_threads} is not from 1 to 1024")
        self._free = library.pool_free
        self.pointer = library.pool_new(num_threads)
        if not self.pointer:
            raise MemoryError("no memory for a pool of threads")

    def close(self) -> None:
        """Joins the threads; the pool must not be running."""
        if self.pointer:
            self._free(self.pointer)
            self.pointer = None

    def __del__(self) -> None:
        self.close()
