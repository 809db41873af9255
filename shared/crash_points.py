"""Moments at which a process can be told to die, to show that nothing is lost there: HEADRACE_CRASH_AT, off by default.

The moments are before and after each script: `before-assign`, `after-commit` (Redis has done it, and this process never
learns so); with a number, `after-commit:3`, at the third time. Set once, at the start of the process (`bootstrap`).
"""

from __future__ import annotations

import os
import signal

NAME = r"(?:(?:before|after)-[a-z_]+(?::[1-9][0-9]*)?)?"

_waits: dict[str, int] = {}  # how often the moment still passes; empty in every process that serves people


def arm(crash_at: str) -> None:
    """'' disarms."""
    name, _, number = crash_at.partition(":")
    _waits.clear()
    if name:
        _waits[name] = int(number or 1)


def reached(moment: str, script: str) -> None:
    """Does not return where the process is to die here: it ends as by `kill -9`."""
    if not _waits:
        return
    name = f"{moment}-{script}"
    if name in _waits:
        _waits[name] -= 1
        if _waits[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
