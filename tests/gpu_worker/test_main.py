"""The start of a worker process: a stop in the middle of loading, and what a failure of the load becomes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from services.gpu_worker import __main__ as main
from shared.runtime import Stop
from shared.settings import current_environ
from tests.gpu_worker.tiny_models import save
from tests.helpers import wait_until


async def test_nobody_waits_for_a_load_once_the_process_is_to_stop() -> None:
    stop, go_on = Stop(), threading.Event()

    def load() -> main.Loaded:
        go_on.wait(30)
        raise AssertionError("nobody sees this")

    loading = asyncio.ensure_future(main._unless_stopped(stop, load))
    await asyncio.sleep(0)
    stop.set()
    assert await asyncio.wait_for(loading, 5) is None
    go_on.set()


async def test_what_a_load_raises_is_raised() -> None:
    def load() -> main.Loaded:
        raise main.ModelFailure("the file is short")

    with pytest.raises(main.ModelFailure, match="short"):
        await main._unless_stopped(Stop(), load)


async def test_a_sigterm_while_the_model_loads_ends_the_process(tmp_path: Path, redis_url: str) -> None:
    """The index of its files is a pipe that nobody writes to, so the load does not end."""
    save("llama", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(index)
    environ = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_MODEL": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gpu_worker", env=current_environ() | environ, stderr=asyncio.subprocess.PIPE
    )
    opened = await wait_until(lambda: _open_if_read(index), 30)
    try:
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0 and b"Traceback" not in errors, errors
        assert time.monotonic() - started < 5
    finally:
        os.close(opened)


def _open_if_read(pipe: Path) -> int | None:
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_what_is_loaded_is_never_searched_for_garbage() -> None:
    def load(fails: bool) -> list[object]:
        with main._uncollected():
            assert not gc.isenabled()
            if fails:
                raise main.ModelFailure("the file is short")
            return [[]]

    try:
        loaded = load(fails=False)
        assert gc.isenabled() and not any(known is loaded for known in gc.get_objects())
    finally:
        gc.unfreeze()
    with pytest.raises(main.ModelFailure):
        load(fails=True)
    assert gc.isenabled() and gc.get_freeze_count() == 0
