"""A process dies at the moment it was told, as by `kill -9`, and at no other; without being told, never."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from services import modules
from shared.settings import CommonSettings, SettingsError, current_environ, load

PASSES = (
    "for i in range(3): crash_points.reached('before', 'commit'); crash_points.reached('after', 'commit'); print(i)"
)


def passed(crash_at: str) -> tuple[int, list[str]]:
    """Exit status, and the rounds that were completed."""
    program = f"from shared import crash_points; crash_points.arm({crash_at!r})\n{PASSES}"
    done = subprocess.run(
        [sys.executable, "-u", "-c", program], env=modules.environ(current_environ()), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.split()


@pytest.mark.parametrize(
    ("crash_at", "rounds"), [("before-commit", 0), ("after-commit:1", 0), ("before-commit:3", 2), ("after-commit:2", 1)]
)
def test_it_dies_at_that_moment(crash_at: str, rounds: int) -> None:
    assert passed(crash_at) == (-signal.SIGKILL, [str(i) for i in range(rounds)])


@pytest.mark.parametrize("crash_at", ["", "before-commit:4", "before-assign"])
def test_it_dies_at_no_other(crash_at: str) -> None:
    assert passed(crash_at) == (0, ["0", "1", "2"])


@pytest.mark.parametrize("crash_at", ["commit", "during-commit", "before-commit:0", "before-commit:x", "after-"])
def test_what_is_no_moment_is_refused(crash_at: str) -> None:
    with pytest.raises(SettingsError, match="crash_at"):
        load(CommonSettings, {"HEADRACE_CRASH_AT": crash_at})
