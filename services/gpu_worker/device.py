"""Which device a worker computes on and in which types, and, where that cannot be a GPU, what is missing."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass

import torch

from kernels.dispatch import interpreted
from services.gpu_worker.kv_pool import cache_dtype
from services.gpu_worker.model.config import ConfigError
from shared.settings import SettingsError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
OLDEST = (8, 0)  # compute capability that kernels are made for


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a GPU computes. deterministic: each row's numbers follow from that row alone, by kernels of ours."""

    dtype: str = "auto"
    enforce_eager: bool = False
    deterministic: bool = True

    def check_on_cpu(self) -> None:
        """ConfigError for what only a GPU can be told."""
        if self.dtype != "auto":
            raise ConfigError(f"dtype: {self.dtype} is a GPU's, and the CPU computes here in a type of its own")


def choose_device(asked: str, engine: str = "auto") -> torch.device | None:
    """Where the GPU engine computes; None for a CPU's engines, of which engine may ask for one by name.

    asked: "cpu", "cuda", or "auto": a GPU if there is one. SettingsError says what is missing. Where Triton interprets
    kernels, "cuda" is played by the CPU, to be tested.
    """
    if engine != "auto" and asked == "cuda":
        raise SettingsError(f"engine: {engine} computes on a CPU, and device is cuda")
    if engine != "auto" or asked == "cpu":
        return None
    if asked == "cuda" and interpreted():
        log.warning("Triton's kernels are interpreted on the CPU, as TRITON_INTERPRET says: for tests alone")
        return torch.device("cpu")
    missing = missing_for_cuda()
    if not missing:
        return torch.device("cuda", torch.cuda.current_device())
    if asked == "cuda":
        raise SettingsError(f"device: cuda is not possible here: {missing} (set by --device or HEADRACE_DEVICE)")
    log.info("computing on the CPU: %s", missing)
    return None


def missing_for_cuda() -> str:
    """What a GPU engine lacks here, empty if nothing."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (the extra `gpu`)"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:
        return str(e).partition(". ")[0].rstrip(".\n")  # of the driver, or that there is no card
    if torch.version.cuda is not None and torch.cuda.get_device_capability() < OLDEST:
        return f"{torch.cuda.get_device_name()} is too old: kernels are made for compute capability 8.0 and later"
    try:
        from kernels.gpu.driver import start_driver  # imports Triton

        start_driver()
    except Exception as e:
        return f"Triton cannot be used here: {e or type(e).__name__}"
    return ""


def computed_types(device: torch.device, dtype: str, kv_cache_dtype: str) -> tuple[torch.dtype, torch.dtype]:
    """What the GPU engine computes in there, and its cache's type: auto is bfloat16, on the CPU float32, for both."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype: {dtype!r} is not supported (known: auto, {', '.join(DTYPES)})")
    computed = DTYPES.get(dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
    return computed, computed if kv_cache_dtype == "auto" else cache_dtype(kv_cache_dtype)
