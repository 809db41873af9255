"""What computes guesses beside a model, if `--speculative-config` says so: found before the model's engine is loaded,
since memory is left for it, and loaded once it is known which engine that is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from services.gpu_worker.device import DeviceOptions
from services.gpu_worker.draft_loading import Draft, draft_of
from services.gpu_worker.drafters import Guesser
from services.gpu_worker.engines import AnyEngine, Aside
from services.gpu_worker.gpu_engine import StepLimits
from services.gpu_worker.heads_loading import Heads, heads_of
from shared import speculative_config
from shared.model_source import ModelSource
from shared.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class AskedGuesser:
    """source: of the model. config: as it was set. Of draft and heads there is at most one."""

    source: ModelSource
    config: str
    draft: Draft | None
    heads: Heads | None

    @property
    def aside(self) -> Aside | None:
        return self.draft or self.heads

    def load(
        self, engine: AnyEngine, device: torch.device | None, limits: StepLimits, options: DeviceOptions
    ) -> Guesser | None:
        """As `Draft.load`. ConfigError where it was asked for and cannot guess for that."""
        if speculative_config.parse(self.config, is_native=engine.info.is_native) is None:
            return None
        if self.heads is not None:
            return self.heads.load_if_possible(engine)
        return self.draft.load(self.source, engine.info, device, limits, options) if self.draft else None


def guesser_of(own: WorkerSettings, source: ModelSource, num_threads: int, cache_dir: Path) -> AskedGuesser:
    """That may be a download. ConfigError for what cannot be."""
    draft = draft_of(own, own.engine, num_threads, cache_dir)
    return AskedGuesser(source, own.speculative_config, draft, heads_of(own, source.path, cache_dir))
