"""Services whose clocks are hours apart, and step while they work, answer as ever, and keep deadlines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import SLOW, mixed, plain
from tests.e2e.stack import NewStack
from tests.figures import note
from tests.helpers import wait_until

# Of each process its own, by the name of its incarnation; all step by ten minutes when the file is there.
SITECUSTOMIZE = """
import os, time
SKEWS = {"g": -3600, "s": 3600, "w": 1800, "c": -86400}
skew = SKEWS.get(os.environ.get("HEADRACE_INCARNATION", "").partition("-")[0], 0)
real, step = time.time, os.path.join(os.path.dirname(__file__), "step")
time.time = lambda: real() + skew + (600 if os.path.exists(step) else 0)
time.time_ns = lambda: int(time.time() * 1e9)
"""


def ahead_s(log_text: str) -> float:
    """How far the clock that wrote the last line is ahead of ours, within a day."""
    hours, minutes, seconds = log_text.splitlines()[-1].split(" ")[0].split(":")
    now = time.localtime()
    ours = now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec
    return (int(hours) * 3600 + int(minutes) * 60 + float(seconds) - ours) % 86400


async def test_no_decision_is_made_by_a_wall_clock(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "skewed"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    async with new_stack(gateways=2, workers=2, env=SLOW) as stack:
        monkeypatch.delenv("PYTHONPATH")
        client = connect(stack.url)
        answers = client.begin_all(mixed("load"))
        await wait_until(lambda: sum(s.num_tokens for s in stack.state.running()) > 20)
        (folder / "step").touch()
        stepped_at = time.perf_counter()
        check_same(await answers, undisturbed)
        note(pause_s=longest_pause_s(await answers, stepped_at))
        assert -3100 < ahead_s(stack.process("gateway").text()) - 86400 < -2900, "an hour, less ten minutes"
        began = time.perf_counter()
        late = await connect(stack.url_of(1)).ask(plain("deadline", 2000, timeout=1))
        assert late.error and late.error["code"] == "timeout" and 1 <= time.perf_counter() - began < 3
