"""Starts a worker: `python -m services.gpu_worker`, configured by the environment.

The engine is loaded, and has computed something, before anything is announced: a worker that cannot load says why and
exits with EXIT_MODEL, or EXIT_CONFIG where a setting is to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn

from tqdm import tqdm

from services.gpu_worker import scripted_engine
from services.gpu_worker.admission import Validate
from services.gpu_worker.batch import Engine
from services.gpu_worker.composer import Budget
from services.gpu_worker.drafters import AnySpeculator, Guesser, drafter_of
from services.gpu_worker.failures import EngineBroken, OutOfMemory, WorkerFailure
from services.gpu_worker.fleet_link import FleetLink
from services.gpu_worker.grammar import Grammars
from services.gpu_worker.loops import WorkerLoops
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.probe import measure
from services.gpu_worker.scripted_engine import ScriptedEngine
from services.gpu_worker.service import WorkerService
from services.gpu_worker.step_cost import StepCost
from shared import bootstrap, bus, model_source, speculative_config
from shared.cores import leaves_one_free, num_cores
from shared.model_source import ModelSourceError
from shared.records import Records
from shared.runtime import EXIT_MODEL, Stop, redis_answers
from shared.scripts import Scripts
from shared.settings import (
    SCRIPTED_MODEL,
    CommonSettings,
    DeviceSettings,
    ScriptedSettings,
    SettingsError,
    WorkerSettings,
)
from shared.vocabulary import Vocabulary, read_vocabulary, scripted_vocabulary

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.010
SHARED_CORES_FLUSH_INTERVAL_S = 0.025  # where compute threads use all cores, and every flush takes from them
SCRIPTED_MAX_MODEL_LEN = 4096

Loaded = tuple[Engine, Validate, StepCost, AnySpeculator | None]


class ModelFailure(Exception):
    """The model's files cannot be served; one sentence for the operator."""


async def serve(
    stop: Stop, common: CommonSettings, own: WorkerSettings, device: DeviceSettings, scripted: ScriptedSettings
) -> int:
    try:
        loaded = await _unless_stopped(stop, lambda: _load(common, own, device, scripted))
    except ModelFailure as e:
        log.error("%s", e)
        return EXIT_MODEL
    except WorkerFailure as e:
        log.error("%s", e, exc_info=e.__cause__)
        return e.STATUS
    if loaded is None:
        return 0
    engine, validate, cost, speculator = loaded
    num_tokens, num_seqs = own.most_in_a_step(engine.info.on_card)
    clients = [bus.connect(common.redis_address) for _ in range(3)]
    try:
        if not await redis_answers(clients[0], stop, volatile=common.volatile):
            return 0
        fleet = speculator.fleet if speculator else None
        scripts = Scripts(clients[0], common.served_name)
        service = WorkerService(
            clients[0], common.served_name, engine, validate=validate, name=socket.gethostname(),
            incarnation=common.incarnation, enable_prefix_caching=own.enable_prefix_caching,
            max_step_s=own.max_step_ms / 1000, blocking=clients[1], heartbeat=clients[2], cost=cost,
            overlap=_has_spare_core(own, engine), drafter=speculator, grammars=Grammars(lambda: _vocabulary(common)),
            fleet=FleetLink(fleet, scripts, Records(clients[0], scripts.prefix)) if fleet else None,
            capacity=Budget(num_tokens, num_seqs, prefill_chunk=num_tokens),
        )  # fmt: skip
        await WorkerLoops(service, _flush_interval_s(own, engine)).run(stop, common.drain_timeout_s)
    except WorkerFailure as e:
        log.error("%s", e)
        return e.STATUS
    finally:
        for client in clients:
            await client.aclose()
    return 0


async def _unless_stopped(stop: Stop, load: Callable[[], Loaded]) -> Loaded | None:
    """The result of a load that takes its time, in a thread that nobody waits for once the process is stopped."""
    loop, finished, results = asyncio.get_running_loop(), asyncio.Event(), deque[Loaded | Exception]()

    def run() -> None:
        try:
            results.append(load())
        except Exception as e:  # raised again below, in the thread that waits for it
            results.append(e)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finished.set)

    threading.Thread(target=run, name="load", daemon=True).start()
    waits = [asyncio.ensure_future(finished.wait()), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if stop.is_set():
        return None
    result = results[0]
    if isinstance(result, Exception):
        raise result
    return result


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What is loaded stays: looking for garbage in it takes a sixth of the start, and would stop steps later."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@_uncollected()
def _load(common: CommonSettings, own: WorkerSettings, device: DeviceSettings, scripted: ScriptedSettings) -> Loaded:
    """An engine that has computed something. SettingsError, ModelFailure or WorkerFailure, in a sentence, if not."""
    started = time.monotonic()
    try:
        engine, validate, draft = _scripted(own, scripted) if own.engine == "scripted" else _model(common, own, device)
        cost, speculator = _measure(engine, draft, own)
    except SettingsError:
        raise
    except (ConfigError, ModelSourceError) as e:
        raise SettingsError(f"{common.model} cannot be served: {e}") from e
    except (ValueError, OSError) as e:
        raise ModelFailure(f"{common.model} cannot be served: {e}") from e
    except MemoryError as e:
        raise OutOfMemory(f"there is not enough memory to load {common.model}: {e}") from None
    info = engine.info
    log.info(
        "%s loaded in %.1f s: context %d, %d KV blocks of %d tokens, variant %s", common.served_name,
        time.monotonic() - started, info.max_model_len, info.num_blocks, info.block_size, info.variant,
    )  # fmt: skip
    return engine, validate, cost, speculator


def _measure(engine: Engine, draft: Guesser | None, own: WorkerSettings) -> tuple[StepCost, AnySpeculator | None]:
    try:
        return measure(engine), drafter_of(own, engine, draft)
    except MemoryError:
        raise
    except Exception as e:
        raise EngineBroken("the engine cannot compute anything with this model") from e


def _scripted(own: WorkerSettings, scripted: ScriptedSettings) -> tuple[Engine, Validate, Engine | None]:
    engine = ScriptedEngine(
        num_blocks=scripted.scripted_num_blocks, block_size=own.block_size,
        max_model_len=own.max_model_len or SCRIPTED_MAX_MODEL_LEN, step_s=scripted.scripted_step_ms / 1000,
        token_s=scripted.scripted_token_ms / 1000, crash_on=scripted.scripted_crash_on.encode(),
        hang_on=scripted.scripted_hang_on.encode(), raise_on=scripted.scripted_raise_on.encode(),
    )  # fmt: skip
    config, info, draft = speculative_config.parse(own.speculative_config, is_native=False), engine.info, None
    if (
        config is not None and config.method == "draft_model"
    ):  # whose guesses are right; prompts that ask for the worst are not its own
        draft = ScriptedEngine(
            num_blocks=info.num_blocks, block_size=info.block_size, max_model_len=info.max_model_len,
            crash=lambda status: None, hang=lambda: None,
        )  # fmt: skip
    return engine, scripted_engine.validate, draft


def _model(
    common: CommonSettings, own: WorkerSettings, asked: DeviceSettings
) -> tuple[Engine, Validate, Guesser | None]:
    from services.gpu_worker.device import DeviceOptions, choose_device  # scripted needs no torch, which takes seconds
    from services.gpu_worker.engines import load_engine  # needs torch too
    from services.gpu_worker.gpu_engine import StepLimits  # as above
    from services.gpu_worker.guesser_loading import guesser_of  # as above
    from services.gpu_worker.sampler import validate  # as above

    device = choose_device(asked.device, own.engine)
    source = model_source.resolve(common.model, common.cache_dir)
    guesser = guesser_of(own, source, _num_threads(own), common.cache_dir)
    limits = StepLimits(*own.most_in_a_step(device is not None), asked.gpu_memory_utilization)
    options = DeviceOptions(asked.dtype, asked.enforce_eager, asked.deterministic)
    with tqdm(desc=f"Loading {source.name}", unit_scale=True, disable=None) as bar:

        def show(num_done: int, num_total: int) -> None:
            bar.total = num_total
            bar.update(num_done - bar.n)

        engine = load_engine(
            own.engine, source.path, common.cache_dir,
            kv_cache_bytes=own.kv_cache_bytes or None, block_size=own.block_size,
            max_model_len=own.max_model_len or None, kv_cache_dtype=own.kv_cache_dtype, num_threads=_num_threads(own),
            model_impl=own.model_impl, quantization=own.quantization, device=device, limits=limits, options=options,
            needs_device=asked.device == "cuda", progress=show, aside=guesser.aside,
        )  # fmt: skip
    return engine, validate, guesser.load(engine, device, limits, options)


def _vocabulary(common: CommonSettings) -> Vocabulary:
    if common.model == SCRIPTED_MODEL:
        return scripted_vocabulary()
    return read_vocabulary(model_source.resolve(common.model, common.cache_dir))


def _num_threads(own: WorkerSettings) -> int:
    return own.threads or num_cores()


def _has_spare_core(own: WorkerSettings, engine: Engine) -> bool:
    """Beside the compute threads, if it is a CPU that computes."""
    return engine.info.device != "cpu" or leaves_one_free(_num_threads(own))


def _flush_interval_s(own: WorkerSettings, engine: Engine) -> float:
    return FLUSH_INTERVAL_S if _has_spare_core(own, engine) else SHARED_CORES_FLUSH_INTERVAL_S


def _exit(status: int) -> NoReturn:
    """Ends the process, also while a thread is in native code, which the interpreter's own end would abort."""
    logging.shutdown()
    sys.stderr.flush()
    if any(t.daemon for t in threading.enumerate()):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    _exit(bootstrap.start("gpu_worker", serve))
