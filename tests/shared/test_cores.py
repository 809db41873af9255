"""Cores to compute on, from what the system and the container say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight CPUs, two to a core, and no quota."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cores, "CPUS", tmp_path)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def test_threads_of_a_core_count_once(machine: Path) -> None:
    assert cores.num_cores() == 4


def test_only_cores_that_the_process_may_use(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 5})
    assert cores.num_cores() == 2


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("900000 100000", 4), ("", 4)]
)
def test_a_container_s_quota(machine: Path, quota: str, expected: int) -> None:
    (machine / "cpu.max").write_text(quota)
    assert cores.num_cores() == expected


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "CPUS", tmp_path)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    assert cores.num_cores() == len(os.sched_getaffinity(0))


def test_what_compute_threads_leave_free(machine: Path) -> None:
    assert [cores.leaves_one_free(n) for n in (1, 4, 7, 8)] == [True, True, True, False]
    (machine / "cpu.max").write_text("200000 100000")
    assert [cores.leaves_one_free(n) for n in (1, 2)] == [True, False]


POLICIES = """
import os, subprocess, sys
from shared.cores import give_way
os.sched_setscheduler(0, int(sys.argv[1]), os.sched_param(0))
give_way()
print(os.sched_getscheduler(0), subprocess.check_output([sys.executable, "-c",
    "import os; print(os.sched_getscheduler(0))"], text=True).strip())
"""


@pytest.mark.parametrize(("given", "then"), [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)])
def test_services_wait_for_a_core_unless_told_otherwise(given: int, then: int) -> None:
    if os.sched_getscheduler(0) != os.SCHED_OTHER and given == os.SCHED_OTHER:
        pytest.skip("the tests themselves run at another policy, which may not be left")
    done = subprocess.run([sys.executable, "-c", POLICIES, str(given)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(then)] * 2
