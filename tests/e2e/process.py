"""One life of a service as a real process, and its log."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from shared.protocol import MemberKind

LISTENING = re.compile(r"listening on \S+ port (\d+)")


@dataclass
class Process:
    """One life of a service."""

    kind: MemberKind
    index: int
    incarnation: str
    popen: subprocess.Popen[bytes]
    log: Path
    file: BinaryIO
    expected_to_end: bool = False
    may_crash: bool = False  # it was told to, at a moment that may not come

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"

    @property
    def port(self) -> int:
        """Of a gateway that listens; 0 before."""
        found = LISTENING.search(self.text())
        return int(found[1]) if found else 0

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)
