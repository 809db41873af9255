"""How many cores there are to compute on: physical ones that this process may use, within the container's quota;
and who has to wait for one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_cores() -> int:
    """At least 1. Two threads of one core share its arithmetic units, so they count once."""
    usable = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in usable}
    return max(1, min(len(cores), _quota() or len(cores)))


def leaves_one_free(num_threads: int) -> bool:
    """Is there something to run on beside so many compute threads? A core's second thread counts here."""
    num_usable = len(os.sched_getaffinity(0))
    return num_threads < min(num_usable, _quota() or num_usable)


def give_way() -> None:
    """From now on this process and its children do not take a core from others whenever they wake up: a thread that
    computes may hold a piece of a step for which all others wait. One that was started with another policy keeps it."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _siblings(cpu: int) -> str:
    """The same text for all threads of a core."""
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """The quota of the cgroup (version 2) in cores, rounded up; None where there is none."""
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
