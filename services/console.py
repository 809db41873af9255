"""The terminal of `serve`: lines of all processes, each with a coloured name in front.

Writing happens in a thread of its own. A reader that stops (a paused terminal, a full pipe) costs log lines, which are
counted, and never holds up a service that is just logging.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading

MAX_WAITING_LINES = 10_000
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Console:
    """Lines for a file descriptor, without a buffer whose lock a stuck writer would hold at the end of the process."""

    def __init__(self, fd: int, names: list[str], colour: bool = False, prefixed: bool = True) -> None:
        self._fd = fd
        self._width = max(map(len, names), default=0)
        self._colours = dict(zip(names, itertools.cycle(COLOURS), strict=False)) if colour else {}
        self._prefixed = prefixed
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write_lines, name="console", daemon=True)
        self._writer.start()

    def line(self, name: str, text: str) -> None:
        """Never blocks."""
        self._put(self._prefix(name) + text if self._prefixed else text)

    def plain(self, text: str) -> None:
        """Without a name in front: for people."""
        self._put(text)

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what is left, for at most about that long."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._writer.join(timeout_s)

    def _prefix(self, name: str) -> str:
        label = f"{name:<{self._width}} |"
        colour = self._colours.get(name)
        return f"\x1b[{colour}m{label}\x1b[0m " if colour else f"{label} "

    def _put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_dropped += 1

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._num_dropped:
                num_dropped, self._num_dropped = self._num_dropped, 0
                line = f"({num_dropped} lines not shown: the reader was too slow)\n{line}"
            try:
                _write_all(self._fd, (line + "\n").encode("utf-8", "replace"))
            except OSError:
                return  # nobody reads any more; services go on


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class NamedStream:
    """The console as a stream for the logging of its own process: one write a line."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name

    def write(self, text: str) -> int:
        if text.strip():
            for line in text.rstrip("\n").split("\n"):
                self._console.line(self._name, line)
        return len(text)

    def flush(self) -> None:
        """Lines are on their way as soon as they are written."""
