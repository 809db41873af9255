"""Children are kept running, heard, told of, and stopped in order; none outlives the supervisor."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services import supervisor as supervisor_module
from services.supervisor import MAX_DELAY_S, MAX_LINE_BYTES, Child, Program, Supervisor, describe_exit, restart_delay_s
from shared.runtime import EXIT_CONFIG, EXIT_HUNG, EXIT_LAPSED, EXIT_MODEL
from tests.helpers import wait_until

WAITS = "import signal, sys, time\nsys.stdout.write('up\\n'); sys.stdout.flush()\ntime.sleep(600)"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS


class Stage:
    """A supervisor under test and what it showed and reported."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.reports: list[tuple[str, str]] = []
        self.num_lives = 0
        self.supervisor = Supervisor(lambda name, line: self.lines.append((name, line)), self.report, 10.0)

    async def report(self, program: Program, incarnation: str) -> None:
        self.reports.append((program.name, incarnation))

    def start(self, code: str, name: str = "child", stage: int = 0) -> Child:
        def new_incarnation() -> str:
            self.num_lives += 1
            return f"{name}-{self.num_lives}"

        argv = (sys.executable, "-c", code)
        return self.supervisor.start(Program(name, argv, stage, lambda i: {"INCARNATION": i}, new_incarnation))

    def texts(self, name: str = "child") -> list[str]:
        return [line for n, line in self.lines if n == name]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    stage.supervisor.stop()
    stage.supervisor.stop()
    await stage.supervisor.stop_all()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@given(st.integers(0, 10_000))
def test_delays_grow_and_are_bounded(num_short_lives: int) -> None:
    assert restart_delay_s(num_short_lives) <= restart_delay_s(num_short_lives + 1) <= MAX_DELAY_S
    assert restart_delay_s(0) <= 0.1 and restart_delay_s(10) == MAX_DELAY_S


async def test_a_killed_child_is_reported_and_starts_again_as_another_incarnation(stage: Stage) -> None:
    child = stage.start("import os, sys\nsys.stdout.write(os.environ['INCARNATION'] + '\\n')\n" + WAITS)
    await wait_until(lambda: stage.texts() == ["child-1", "up"])
    assert child.process
    child.process.kill()
    await wait_until(lambda: stage.texts() == ["child-1", "up", "child-2", "up"])
    assert stage.reports == [("child", "child-1")]


async def test_a_crash_loop_slows_down(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[int] = []

    def recorded(num_short_lives: int) -> float:
        delays.append(num_short_lives)
        return 0.0

    monkeypatch.setattr(supervisor_module, "restart_delay_s", recorded)
    stage.start("raise SystemExit(3)")
    await wait_until(lambda: len(delays) >= 3)
    assert delays[:3] == [0, 1, 2]


async def test_a_lapsed_life_is_no_crash(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[int] = []
    monkeypatch.setattr(supervisor_module, "restart_delay_s", lambda n: delays.append(n) or 0.0)
    stage.start(f"raise SystemExit({EXIT_LAPSED})")
    await wait_until(lambda: len(delays) >= 3)
    assert set(delays) == {0}


@pytest.mark.parametrize(
    ("status", "meaning"), [(EXIT_CONFIG, "its settings cannot be used"), (EXIT_MODEL, "its model cannot be served")]
)
async def test_what_no_restart_helps_stops_everything_with_the_message(
    status: int, meaning: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.start(WAITS, "good")
    stage.start(f"import sys\nsys.stderr.write('port: is odd\\n')\nsys.exit({status})", "bad")
    await asyncio.wait_for(stage.supervisor.wait_for_stop(), 10)
    assert stage.supervisor.status == status
    assert f"bad cannot run, {meaning}: port: is odd" in caplog.text
    await stage.supervisor.stop_all()
    assert [name for name, _ in stage.reports] == ["good"]


async def test_a_report_that_hangs_or_fails_does_not_hold_up_the_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(program: Program, incarnation: str) -> None:
        raise ConnectionError("Redis is away")

    async def hangs(program: Program, incarnation: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(supervisor_module, "REPORT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.0)
    report: Callable[[Program, str], Awaitable[None]]
    for report in (fails, hangs):
        supervisor = Supervisor(lambda name, line: None, report, 10.0)
        child = supervisor.start(Program("c", (sys.executable, "-c", "pass"), 0, lambda _: {}))
        await wait_until(lambda child=child: child.num_exits >= 2)
        await supervisor.stop_all()


async def test_stages_stop_one_after_the_other_and_nothing_is_left(stage: Stage) -> None:
    says_end = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(sys.stdout.write('end\\n') and 0))\n"
    )
    children = [stage.start(says_end + WAITS, name, number) for name, number in (("c", 2), ("a", 0), ("b", 1))]
    await wait_until(lambda: sum(line == "up" for _, line in stage.lines) == 3)
    pids = [child.process.pid for child in children if child.process]
    await stage.supervisor.stop_all()
    assert [name for name, line in stage.lines if line == "end"] == ["a", "b", "c"]
    assert len(pids) == 3 and all(map(is_gone, pids)) and stage.supervisor.status == 0


async def test_a_child_that_does_not_stop_is_killed_with_its_own_children(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    forks = "import os\npid = os.fork()\nif pid:\n    os.write(1, f'{pid}\\n'.encode())\n"
    child = stage.start(forks + DEAF)
    stage.supervisor._stop_timeout_s = 0.2
    await wait_until(lambda: stage.texts().count("up") == 2)
    assert child.process
    pids = [child.process.pid, next(int(text) for text in stage.texts() if text.isdigit())]
    await stage.supervisor.stop_all()
    assert "child does not stop and is killed" in caplog.text
    await wait_until(lambda: all(map(is_gone, pids)))


async def test_a_second_stop_is_quick(stage: Stage) -> None:
    child = stage.start(DEAF)
    stage.supervisor._stop_timeout_s = 600
    await wait_until(lambda: stage.texts() == ["up"])
    assert child.process
    pid = child.process.pid
    stage.supervisor.stop()
    stopping = asyncio.create_task(stage.supervisor.stop_all())
    await asyncio.wait([stopping], timeout=0.2)
    assert not stopping.done()
    stage.supervisor.stop()
    await asyncio.wait_for(stopping, 10)
    assert is_gone(pid)


async def test_stopping_between_two_lives_starts_no_other(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 600.0)
    child = stage.start("pass")
    await wait_until(lambda: child.num_exits == 1)
    await asyncio.wait_for(stage.supervisor.stop_all(), 10)
    assert stage.num_lives == 1


async def test_stopping_in_the_middle_of_a_start_leaves_nothing(stage: Stage) -> None:
    others = set(psutil.Process().children(recursive=True))  # a Redis of other tests, most likely
    stage.start(WAITS)
    await asyncio.sleep(0)
    await asyncio.wait_for(stage.supervisor.stop_all(), 10)
    assert not [p for p in set(psutil.Process().children(recursive=True)) - others if not is_gone(p.pid)]


async def test_a_program_that_cannot_be_started_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)
    child = stage.start(WAITS)
    await wait_until(lambda: child.num_exits == 1)
    monkeypatch.undo()
    await wait_until(lambda: stage.texts() == ["up"])


async def test_lines_of_any_length_and_content_are_shown_safely(stage: Stage) -> None:
    code = f"""
import os, time
os.write(1, b"x" * {3 * MAX_LINE_BYTES} + b"\\nbad \\xff\\x1b[2J end\\n\\n  \\npart")
"""
    child = stage.start(code)
    await wait_until(lambda: child.num_exits == 1)
    *long, bad, part = stage.texts()
    assert "".join(long) == "x" * 3 * MAX_LINE_BYTES and all(len(text) <= 2 * MAX_LINE_BYTES for text in long)
    assert bad == "bad \ufffd\\x1b[2J end" and part == "part"


async def test_ctrl_c_in_the_terminal_does_not_reach_a_child(stage: Stage) -> None:
    child = stage.start(WAITS)
    await wait_until(lambda: stage.texts() == ["up"])
    assert child.process
    assert psutil.Process(child.process.pid).terminal() is None or _session(child.process.pid) == child.process.pid
    assert _session(child.process.pid) != _session(psutil.Process().pid)


def _session(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


def test_ends_are_described_for_people() -> None:
    assert describe_exit(-signal.SIGKILL) == "was ended by SIGKILL"
    assert describe_exit(3) == "ended with status 3"
    assert describe_exit(EXIT_HUNG) == "ended with status 70 (a step did not end)"
