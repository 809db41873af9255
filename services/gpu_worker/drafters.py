"""Who guesses for a worker, as `--speculative-config` says for its engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from services.gpu_worker.batch import Engine
from services.gpu_worker.probe import measure_rows
from services.gpu_worker.speculative.auto import AutoSpeculator
from services.gpu_worker.speculative.batch_proposer import BatchProposer, RowReader
from services.gpu_worker.speculative.draft_model import DraftModel
from services.gpu_worker.speculative.fleet import Fleet
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.purse import Purse
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.speculative.speculator import Speculator
from shared import speculative_config
from shared.settings import WorkerSettings
from shared.speculative_config import SpeculativeConfig

log = logging.getLogger(__name__)

AnySpeculator = Speculator | ModelSpeculator | AutoSpeculator
Guesser = Engine | BatchProposer  # a draft model's, or heads


def drafter_of(own: WorkerSettings, engine: Engine, guesser: Guesser | None) -> AnySpeculator | None:
    """As the settings say for this engine, which the log repeats."""
    config = speculative_config.parse(own.speculative_config, is_native=engine.info.is_native)
    log.info("speculative decoding: %s", _said(config, guesser, own.speculative_config))
    return make_drafter(config, engine, guesser, own.max_step_ms / 1000)


def _said(config: SpeculativeConfig | None, guesser: Guesser | None, asked: str) -> str:
    if config is None:
        return "none" + (", since no native kernels compute" if asked == speculative_config.AUTO else "")
    if config.method in speculative_config.MODELS:
        return config.method
    others, heads = ["other answers"] if config.fleet else [], ["heads"] if guesser is not None else []
    return f"{config.method}, from {', '.join(['texts', *others, *heads])}"


def make_drafter(
    config: SpeculativeConfig | None, engine: Engine, draft: Guesser | None, max_step_s: float
) -> AnySpeculator | None:
    """With what steps cost, measured on the engines. draft: of the method draft_model, the model's; or heads."""
    if config is None:
        return None
    cost = measure_rows(engine)
    if config.method == "auto":
        assert draft is None or isinstance(draft, RowReader)
        return make_auto(config, draft, cost, max_step_s, Fleet(engine.info.vocab_size) if config.fleet else None)
    if draft is None:
        fleet = Fleet(engine.info.vocab_size) if config.fleet else None
        return Speculator(config, cost, max_step_s=max_step_s, fleet=fleet, clock=time.monotonic)
    model = draft if isinstance(draft, BatchProposer) else DraftModel(draft, measure_rows(draft))
    return ModelSpeculator(config, model, time.monotonic, cost, max_step_s=max_step_s)


def make_auto(
    config: SpeculativeConfig, heads: RowReader | None, cost: RowCost, max_step_s: float, fleet: Fleet | None,
    clock: Callable[[], float] = time.monotonic,
) -> Speculator | AutoSpeculator:  # fmt: skip
    """Without heads what is in texts, alone."""
    purse = Purse()
    own = config.model_copy(update={"method": "suffix"})
    text = Speculator(own, cost, max_step_s=max_step_s, fleet=fleet, clock=clock, purse=purse)
    if heads is None:
        return text
    own = config.model_copy(update={"method": "eagle3"})
    model = ModelSpeculator(own, heads, clock, cost, max_step_s=max_step_s, purse=purse)
    auto = AutoSpeculator(text, model, "eagle3")
    heads.wants, heads.wants_any = auto.wants_rows, lambda: auto.wants_any
    return auto
