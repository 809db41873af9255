"""Heads that draft, as `--speculative-config` names them: for the native engine and a GPU's, with their own KV pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from services.gpu_worker.batch import Engine
from services.gpu_worker.device import DeviceOptions, computed_types
from services.gpu_worker.engine import memory_errors
from services.gpu_worker.gpu_engine import GpuEngine, StepLimits
from services.gpu_worker.gpu_memory import NOTHING_BESIDE, Beside
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.model.native_decoder import block_bytes
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.planning import Limits, head_beside, head_step_bytes
from services.gpu_worker.speculative.gpu_eagle import GpuEagle, load_gpu_eagle
from services.gpu_worker.speculative.gpu_medusa import GpuMedusa, load_gpu_medusa
from services.gpu_worker.speculative.head_config import (
    EagleConfig,
    MedusaConfig,
    drafting_layer,
    read_eagle,
    read_medusa,
)
from services.gpu_worker.speculative.head_proposer import MAX_KEPT_ROWS, HeadProposer
from services.gpu_worker.speculative.medusa_proposer import MedusaProposer
from services.gpu_worker.speculative.native_eagle import NativeEagle, load_eagle
from services.gpu_worker.speculative.native_medusa import NativeMedusa, load_medusa, no_layers
from services.gpu_worker.warm_up import sizes_on, warm_up_eagle, warm_up_medusa
from services.gpu_worker.weights.head_files import CONFIG, HeadFiles
from services.gpu_worker.weights.loader import open_source
from services.gpu_worker.weights.native_loader import return_freed_memory
from services.gpu_worker.weights.safetensors import QUANTIZATION, json_object
from services.gpu_worker.weights.source import WeightsError
from shared import model_source, speculative_config
from shared.settings import WorkerSettings

log = logging.getLogger(__name__)

KEY = "speculative_config: model"
PACKAGED = Path(__file__).parent / "heads"  # by the names of models that come along


@dataclass(frozen=True)
class Heads:
    """What is asked for, of a model. comes_along: nobody has asked for just these, so they need not be able to.
    on_gpus: are they for engines there too?"""

    folder: Path
    kind: Literal["medusa", "eagle", "eagle3"]
    target: Path
    block_size: int
    comes_along: bool = False
    on_gpus: bool = True

    def block_bytes(self, is_native: bool = True) -> int:
        """What each block of the target takes more, on a CPU, where they compute beside the native engine alone."""
        config = self._config
        if not is_native or isinstance(config, MedusaConfig):
            return 0
        return block_bytes(drafting_layer(config), self.block_size, "auto")

    @cached_property
    def _config(self) -> EagleConfig | MedusaConfig:
        """The model's file is read for it, all its words."""
        target = open_source(self.target).config
        try:
            values = json_object(self.folder / CONFIG)
            values.pop(QUANTIZATION, None)  # what weights are stored in is no part of what is computed
            return read_medusa(values, target) if self.kind == "medusa" else read_eagle(values, self.kind, target)
        except (ConfigError, WeightsError) as e:
            raise ConfigError(f"{KEY}: {e}") from None

    def beside(self, limits: Limits) -> Beside:
        """What they take beside the model, by their files' headers."""
        config, weights = self._config, HeadFiles(self.folder).num_bytes
        if isinstance(config, MedusaConfig):
            rows = limits.max_num_seqs * (1 + config.num_heads)
            return Beside(weights, head_step_bytes(no_layers(config), limits, 1, rows), 0)
        layer = drafting_layer(config)
        step = head_step_bytes(layer, limits, len(config.tap_layers), MAX_KEPT_ROWS)
        return Beside(weights, step, self.block_bytes())

    def on_card(self, device: torch.device, limits: StepLimits, options: DeviceOptions) -> Beside:
        """As `beside`, on a GPU."""
        if not self.on_gpus:
            return NOTHING_BESIDE
        config, (dtype, _) = self._config, computed_types(device, options.dtype, "auto")
        weights = HeadFiles(self.folder).device_bytes(dtype)
        own = Limits(self.block_size, limits.max_num_batched_tokens, limits.max_num_seqs, dtype=options.dtype)
        if not isinstance(config, MedusaConfig):
            return head_beside(config.layer, weights, len(config.tap_layers), own, device)
        rows, size = limits.max_num_seqs * (1 + config.num_heads), config.hidden_size * dtype.itemsize
        logits = 4 * limits.max_num_seqs * (2 * config.draft_vocab_size + config.vocab_size)
        return Beside(weights, (2 * limits.max_num_batched_tokens + 3 * rows) * size + logits, 0)

    def fit(self) -> bool:
        """By their configuration and the model's, and what their files say of themselves."""
        try:
            self.block_bytes()
            HeadFiles(self.folder)
        except (ConfigError, WeightsError, OSError) as e:
            log.warning("guessing from texts alone: %s", e)
            return False
        return True

    def load_if_possible(self, engine: Engine) -> HeadProposer | MedusaProposer | None:
        """None where they only come along and cannot draft for it; ConfigError where they are asked for."""
        try:
            with memory_errors():
                return self.load(engine)
        except Exception as e:
            if not self.comes_along:
                raise
            is_known = isinstance(e, ConfigError | MemoryError | OSError)
            log.warning("guessing from texts alone: %s", e, exc_info=not is_known)
            return None

    def load(self, engine: Engine) -> HeadProposer | MedusaProposer:
        """ConfigError where they cannot draft for it."""
        if not isinstance(engine, NativeEngine | GpuEngine):
            raise ConfigError(f"speculative_config: method: {self.kind} computes on a GPU or with native kernels only")
        target = engine.config
        if target.embedding_scale != 1.0 or target.logit_scale != 1.0:
            raise ConfigError(f"speculative_config: method: {self.kind} knows no scaled embedding and no scaled logits")
        try:
            if isinstance(engine, GpuEngine):
                return self._on_gpu(engine)
            loaded = self._medusa(engine) if self.kind == "medusa" else self._eagle(engine, self.kind)
        except (ConfigError, WeightsError) as e:
            raise ConfigError(f"{KEY}: {e}") from None
        return_freed_memory()
        return loaded

    def _on_gpu(self, engine: GpuEngine) -> HeadProposer | MedusaProposer:
        info, target, shared = engine.info, engine.config, engine.decoder.weights
        if self.kind == "medusa":
            medusa, its_weights = load_gpu_medusa(self.folder, target, engine.device, engine.dtype)
            heads = GpuMedusa(medusa, its_weights, engine.device)
            rows = torch.zeros(1, medusa.hidden_size, dtype=engine.dtype, device=engine.device)
            warm_up_medusa(heads, rows, sizes_on(engine.device))
            medusa_proposer = MedusaProposer(heads)
            engine.tap(medusa.tap_layers, medusa_proposer.take)
            return medusa_proposer
        config, weights = load_gpu_eagle(self.folder, self.kind, target, shared, engine.device, engine.dtype)
        head = GpuEagle(config, weights, num_blocks=info.num_blocks, block_size=info.block_size,
                        max_model_len=info.max_model_len, device=engine.device, dtype=engine.dtype,
                        recorder=engine.recorder)  # fmt: skip
        warm_up_eagle(head, len(config.tap_layers), sizes_on(engine.device), info.max_model_len)
        proposer = HeadProposer(head, info.block_size)
        engine.tap(config.tap_layers, proposer.take, proposer.wants_rows)
        return proposer

    def _medusa(self, engine: NativeEngine) -> MedusaProposer:
        config, weights = load_medusa(self.folder, engine.config)
        proposer = MedusaProposer(NativeMedusa(config, weights, engine.decoder))
        engine.tap(config.tap_layers, proposer.take)
        return proposer

    def _eagle(self, engine: NativeEngine, kind: Literal["eagle", "eagle3"]) -> HeadProposer:
        info = engine.info
        config, weights = load_eagle(self.folder, kind, engine.config, engine.decoder.weights)
        head = NativeEagle(config, weights, engine.decoder, num_blocks=info.num_blocks, block_size=info.block_size,
                           max_model_len=info.max_model_len)  # fmt: skip
        proposer = HeadProposer(head, info.block_size)
        engine.tap(config.tap_layers, proposer.take, proposer.wants_rows)
        return proposer


def heads_of(own: WorkerSettings, target: Path, cache_dir: Path) -> Heads | None:
    """Where the method is one of heads, which may be a download, or takes them where they come along."""
    config = speculative_config.parse(own.speculative_config, is_native=own.engine != "torch")
    if config is not None and config.method == "auto":
        folder = _packaged(target) if own.engine != "torch" else None
        on_gpus = speculative_config.parse(own.speculative_config, is_native=False) is not None
        heads = Heads(folder, "eagle3", target, own.block_size, True, on_gpus) if folder else None
        return heads if heads is not None and heads.fit() else None
    if config is None or config.method not in speculative_config.HEADS:
        return None
    if not config.model:
        return Heads(packaged_heads(target), "eagle3", target, own.block_size)
    source = model_source.resolve(config.model, cache_dir)
    if source.kind != "hf":
        raise ConfigError(f"{KEY}: {config.model} is not a folder with {CONFIG} and safetensors files")
    kinds: dict[str, Literal["medusa", "eagle", "eagle3"]] = {"medusa": "medusa", "eagle": "eagle", "eagle3": "eagle3"}
    return Heads(source.path, kinds[config.method], target, own.block_size)


def packaged_heads(target: Path) -> Path:
    """ConfigError where none come along."""
    folder = _packaged(target)
    if folder is None:
        names = ", ".join(model_source.KNOWN)
        raise ConfigError(f"{KEY}: is missing; only {names} has a head that comes along")
    return folder


def _packaged(target: Path) -> Path | None:
    for name, model in model_source.KNOWN.items():
        if model.file_name == target.name and (PACKAGED / name).is_dir():
            return PACKAGED / name
    return None
