"""A program started by the launcher ends with its parent, also when that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared import launcher
from tests.helpers import wait_until_sync

ROOT = Path(__file__).parents[2]
PARENT = """
import signal, subprocess, sys, time
from shared import launcher
child = subprocess.Popen(launcher.command(["sleep", "600"], signal.SIGKILL), start_new_session=True)
sys.stdout.write(f"{child.pid}\\n")
sys.stdout.flush()
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_dies_with_its_parent(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until_sync(lambda: child.name() == "sleep")  # the launcher has become the program
        parent.send_signal(how)
    wait_until_sync(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    args = launcher.command(["echo", "started"], signal.SIGKILL)
    args[args.index(launcher.__file__) + 1] = "1"  # another parent than the one that it has
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""


def test_a_program_that_is_missing_is_named() -> None:
    done = subprocess.run(
        launcher.command(["no-such-program"], signal.SIGKILL), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr == "no-such-program: No such file or directory\n"
