"""Which engine computes: on a GPU there is one; on a CPU the native one where its ops can be had, else torch's.

Chosen once in a worker's life."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.native import build
from kernels.native.build import NoNativeOps
from kernels.native.library import NativeLibrary
from services.gpu_worker.cuda_graphs import CudaRecorder
from services.gpu_worker.device import DeviceOptions
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.gpu_engine import DEFAULT_LIMITS, GpuEngine, StepLimits
from services.gpu_worker.gpu_memory import NOTHING_BESIDE, Beside, CudaCard
from services.gpu_worker.model.config import ConfigError, NotNativeError, NotOnGpuError, UnknownArchitectureError
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.weights.loader import Progress

log = logging.getLogger(__name__)


AnyEngine = NativeEngine | TorchEngine | GpuEngine


class Aside(Protocol):
    """Who guesses beside a model: what it will take of memory, where the model computes on a CPU or on a GPU."""

    def block_bytes(self, is_native: bool) -> int:
        """Of each block, on a CPU, beside the native engine or torch's."""
        ...

    def on_card(self, device: torch.device, limits: StepLimits, options: DeviceOptions) -> Beside: ...


def load_engine(
    kind: str,
    model: Path,
    cache_dir: Path,
    *,
    num_threads: int,
    model_impl: str = "auto",
    device: torch.device | None = None,
    needs_device: bool = False,
    limits: StepLimits = DEFAULT_LIMITS,
    options: DeviceOptions | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int = 16,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: str = "none",
    progress: Progress | None = None,
    num_blocks: int | None = None,
    aside: Aside | None = None,
    say: Callable[[str], None] = log.info,
) -> AnyEngine:
    """kind: "native", "torch", or "auto": native unless that is impossible, here or for this model.

    Libraries are kept in cache_dir/native. device: of the GPU engine, where that is to compute; needs_device: or none.
    limits: of its steps and memory. options: how it computes. model_impl: "headrace" for architectures that `families`
    describes, "transformers" for whatever can be computed with its code, "auto" for that where the architecture is not
    described. num_blocks: of the pool, where that is settled. aside: for whom memory is left.

    ConfigError if native ops are asked for and cannot be had; else as the engines' own `load`.
    """
    settings: dict[str, Any] = {
        "kv_cache_bytes": kv_cache_bytes, "block_size": block_size, "max_model_len": max_model_len,
        "kv_cache_dtype": kv_cache_dtype, "quantization": quantization, "progress": progress, "num_blocks": num_blocks,
    }  # fmt: skip
    options = options or DeviceOptions()
    ours_alone = kind == "native" or needs_device
    if model_impl != "transformers":
        try:
            on_device = None
            if device is not None and kind == "auto":
                torch.set_num_threads(num_threads)  # weights are converted by them
                beside = aside.on_card(device, limits, options) if aside else NOTHING_BESIDE
                on_device = _on_device(model, device, needs_device, limits, options, settings | {"beside": beside})
                if on_device is not None and device.type == "cuda":
                    torch.set_num_threads(1)  # what is left for a CPU is small, and others' cores
            if on_device is None:
                options.check_on_cpu()
            return on_device or _on_cpu(kind, model, cache_dir, num_threads, say, settings, aside)
        except UnknownArchitectureError as e:
            if model_impl == "headrace" or ours_alone:
                raise
            log.warning("computing with transformers' code on the CPU, which is slow: %s", e)
    elif ours_alone:
        raise ConfigError("model_impl: transformers computes with torch on a CPU")
    options.check_on_cpu()
    return TorchEngine.load(model, num_threads=num_threads, model_impl="transformers", **_with(aside, settings))


def _on_device(
    model: Path, device: torch.device, needs_device: bool, limits: StepLimits, options: DeviceOptions,
    settings: dict[str, Any],
) -> GpuEngine | None:  # fmt: skip
    on_card = device.type == "cuda"
    card, recorder = (
        CudaCard(device) if on_card else None,
        CudaRecorder() if on_card and not options.enforce_eager else None,
    )
    try:
        return GpuEngine.load(
            model, device, limits=limits, card=card, recorder=recorder, dtype=options.dtype,
            fast=not options.deterministic, **settings,
        )  # fmt: skip
    except (MemoryError, NotOnGpuError) as e:
        reason = str(e) if isinstance(e, NotOnGpuError) else f"the GPU's memory does not suffice: {e}"
        if needs_device:  # another try would end the same way
            raise ConfigError(reason) from None
        log.warning("computing on the CPU: %s", reason)
        return None


def _on_cpu(
    kind: str, model: Path, cache_dir: Path, num_threads: int, say: Callable[[str], None], settings: dict[str, Any],
    aside: Aside | None,
) -> AnyEngine:  # fmt: skip
    library = None if kind == "torch" else _library(cache_dir / "native", kind == "native", say)
    if library is not None:
        try:
            own = _with(aside, settings, is_native=True)
            return NativeEngine.load(model, library, num_threads=num_threads, **own)
        except NotNativeError as e:
            if kind == "native":
                raise
            log.warning("computing with torch, which is several times slower: %s", e)
    return TorchEngine.load(model, num_threads=num_threads, **_with(aside, settings))


def _with(aside: Aside | None, settings: dict[str, Any], is_native: bool = False) -> dict[str, Any]:
    return settings | {"draft_block_bytes": aside.block_bytes(is_native) if aside else 0}


def cpu_kind(kind: str, cache_dir: Path) -> str:
    """What `auto` comes to on this machine, for any model that the native engine can compute: torch without its ops."""
    return "torch" if kind == "auto" and _library(cache_dir / "native", False, log.info) is None else kind


def _library(folder: Path, needed: bool, say: Callable[[str], None]) -> NativeLibrary | None:
    try:
        return build.load(folder, say)
    except NoNativeOps as e:
        if needed:
            raise ConfigError(f"engine: native is not possible here: {e}") from e
        log.warning("computing with torch, which is several times slower: %s", e)
        return None
