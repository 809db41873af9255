"""Starts a program that cannot outlive its parent: `python -I -S launcher.py PARENT_PID SIGNAL PROGRAM [ARG…]`.

The kernel sends the signal when the parent dies, however it dies; the setting survives the exec, so it holds for any
program, Redis included, and no service has to know of it. A program of its own because code that runs between fork and
exec in a threaded parent is not safe. Started by its path, with only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def command(argv: Sequence[str], at_parent_death: signal.Signals) -> list[str]:
    """argv as a child of this very process, which must be the one that starts it, from its main thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(at_parent_death)), *argv]


def main(args: Sequence[str]) -> None:
    parent, signal_number, argv = int(args[0]), int(args[1]), list(args[2:])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl was called, so no signal will come
        sys.exit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as e:
        sys.exit(f"{argv[0]}: {e.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
