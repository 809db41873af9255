"""How a service process lives: loops that outlast a lost Redis, one failing loop ends all, signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError

from shared import bus
from shared.runtime import Stop, all_of, farewell, forever, redis_answers, run_until_stopped, wait_for_event
from tests.helpers import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep = asyncio.sleep
    monkeypatch.setattr(bus.asyncio, "sleep", lambda delay: real_sleep(0))


class Steps:
    """A step that raises what it is told to, one after another, and stops when nothing is left."""

    def __init__(self, stop: Stop, *results: Exception | None) -> None:
        self.stop = stop
        self.results = list(results)
        self.num_lost = 0

    async def step(self) -> None:
        await asyncio.sleep(0)
        result = self.results.pop(0)
        if not self.results:
            self.stop.set()
        if result is not None:
            raise result

    def lost(self) -> None:
        self.num_lost += 1


async def test_a_step_is_repeated_until_stopped() -> None:
    stop = Stop()
    steps = Steps(stop, None, None, None)
    await forever("x", steps.step, stop)
    assert steps.results == []


@pytest.mark.parametrize("error", [ConnectionError("x"), TimeoutError("x"), BusyLoadingError("x"), OSError("x")])
async def test_a_lost_redis_is_waited_for(error: Exception) -> None:
    stop = Stop()
    steps = Steps(stop, None, error, error, error, None, error, None, None)
    await forever("x", steps.step, stop, steps.lost)
    assert steps.results == [] and steps.num_lost == 2


async def test_a_time_out_that_says_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    stop = Stop()
    await forever("x", Steps(stop, None, TimeoutError(), None, None).step, stop)
    assert "x: Redis is away (TimeoutError)" in caplog.text


async def test_any_other_failure_ends_the_loop() -> None:
    stop = Stop()
    for results in ([ValueError("broken"), None], [ConnectionError("x"), ValueError("broken"), None]):
        with pytest.raises(ValueError, match="broken"):
            await forever("x", Steps(stop, *results).step, stop)


async def test_waiting_for_redis_ends_when_stopped() -> None:
    stop = Stop()
    await forever("x", Steps(stop, ConnectionError("x"), ConnectionError("x")).step, stop)


async def test_calls_begin_in_order_and_end_together() -> None:
    events: list[str] = []

    async def call(name: str, turns: int, error: Exception | None = None) -> str:
        events.append(f"{name} begins")
        for _ in range(turns):
            await asyncio.sleep(0)
        events.append(f"{name} ends")
        if error:
            raise error
        return name

    assert await all_of([call("a", 3), call("b", 1)]) == ["a", "b"]
    assert events == ["a begins", "b begins", "b ends", "a ends"]
    with pytest.raises(ConnectionError):
        await all_of([call("c", 1, ConnectionError()), call("d", 5)])
    assert events[-1] == "d ends"


async def test_an_event_is_waited_for_no_longer_than_asked() -> None:
    event = asyncio.Event()
    await wait_for_event(event, 0.001)
    waiting = asyncio.ensure_future(wait_for_event(event, 600))
    event.set()
    await waiting


class Loop:
    """Runs until it is cancelled; fails when told to."""

    def __init__(self) -> None:
        self.running = False
        self.cancelled = False
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        self.running = True
        try:
            await self.result
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_loops_are_cancelled_when_stopped() -> None:
    stop, loops = Stop(), [Loop(), Loop()]
    service = asyncio.ensure_future(run_until_stopped([loop.run() for loop in loops], stop))
    await wait_until(lambda: all(loop.running for loop in loops))
    stop.set()
    await service
    assert all(loop.cancelled for loop in loops)


async def test_the_first_failure_ends_all_loops() -> None:
    stop, loops = Stop(), [Loop(), Loop()]
    service = asyncio.ensure_future(run_until_stopped([loop.run() for loop in loops], stop))
    await wait_until(lambda: all(loop.running for loop in loops))
    loops[0].result.set_exception(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await service
    assert loops[1].cancelled and not stop.is_set()


async def test_a_loop_that_ends_by_itself_is_a_failure() -> None:
    loops = [Loop(), Loop()]
    service = asyncio.ensure_future(run_until_stopped([loop.run() for loop in loops], Stop()))
    await wait_until(lambda: all(loop.running for loop in loops))
    loops[0].result.set_result(None)
    with pytest.raises(RuntimeError, match="ended by itself"):
        await service
    assert loops[1].cancelled


async def test_a_cancelled_service_cancels_its_loops() -> None:
    loop = Loop()
    service = asyncio.ensure_future(run_until_stopped([loop.run()], Stop()))
    await wait_until(lambda: loop.running)
    service.cancel()
    with pytest.raises(asyncio.CancelledError):
        await service
    assert loop.cancelled


PROCESS = """
import asyncio, sys
from shared.runtime import main

async def service(stop):
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    if sys.argv[1] == "hangs":
        await asyncio.sleep(600)
    return 7

sys.exit(main(service))
"""


def process(how: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROCESS, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_in_order(sent: signal.Signals) -> None:
    with process("ends") as p:
        assert p.stdout and p.stdout.readline() == "ready\n"
        p.send_signal(sent)
        assert p.stdout.readline() == "stopping\n"
        assert p.wait(10) == 7


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(second: signal.Signals) -> None:
    with process("hangs") as p:
        assert p.stdout and p.stdout.readline() == "ready\n"
        p.send_signal(signal.SIGTERM)
        assert p.stdout.readline() == "stopping\n"
        p.send_signal(second)
        assert p.wait(10) == 1


async def test_a_service_that_is_stopped_while_it_waits_for_redis_does_not_go_on() -> None:
    stop, absent = Stop(), bus.connect("unix:///nowhere/redis.sock")
    asyncio.get_running_loop().call_soon(stop.set)
    assert not await redis_answers(absent, stop)
    await absent.aclose()


async def test_a_service_that_finds_redis_starts_and_one_that_does_not_says_so(redis_url: str) -> None:
    client, absent = bus.connect(redis_url), bus.connect("unix:///nowhere/redis.sock")
    assert await redis_answers(client, Stop())
    with pytest.raises(bus.NoRedis, match="does not answer"):
        await redis_answers(absent, Stop(), timeout_s=0)
    await client.aclose()
    await absent.aclose()


async def test_a_farewell_that_nobody_hears_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def unheard() -> None:
        raise ConnectionError("it is gone")

    await farewell(unheard())
    assert "left without a word, Redis is away (it is gone)" in caplog.text
    with pytest.raises(ZeroDivisionError):
        await farewell(wrong())


async def wrong() -> None:
    raise ZeroDivisionError
