"""Who guesses for a worker, as `--speculative-config` says."""

from __future__ import annotations

import time

from services.gpu_worker.batch import Engine
from services.gpu_worker.probe import measure_rows
from services.gpu_worker.speculative.batch_proposer import BatchProposer
from services.gpu_worker.speculative.draft_model import DraftModel
from services.gpu_worker.speculative.fleet import Fleet
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.speculator import Speculator
from shared.speculative_config import SpeculativeConfig

AnySpeculator = Speculator | ModelSpeculator
Guesser = Engine | BatchProposer  # a draft model's, or heads


def make_drafter(
    config: SpeculativeConfig | None, engine: Engine, draft: Guesser | None, max_step_s: float
) -> AnySpeculator | None:
    """With what steps cost, measured on the engines. draft: of the method draft_model, the model's; or heads."""
    if config is None:
        return None
    cost = measure_rows(engine)
    if draft is None:
        fleet = Fleet(engine.info.vocab_size) if config.fleet else None
        return Speculator(config, cost, max_step_s=max_step_s, fleet=fleet, clock=time.monotonic)
    model = draft if isinstance(draft, BatchProposer) else DraftModel(draft, measure_rows(draft))
    return ModelSpeculator(config, model, time.monotonic, cost, max_step_s=max_step_s)
