"""What runs in a process that its gateway can kill, because no other bound holds: the loop around it.

Takes frames on its standard input and answers each on its standard output (`child_pool.py` is the other end). It has no
environment, no connection and may write no file; what it may use of memory and processor time is limited by the
kernel, whatever it is asked.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_MEMORY_BYTES = 1 << 30
HEADER_BYTES = 4

Frame = dict[str, Any]
Answer = Callable[[Frame], Frame]


def run(requests: BinaryIO, answers: BinaryIO, open_: Callable[[Frame], tuple[Frame, Answer]]) -> None:
    """Until the gateway closes its end. open_ takes the first frame, and gives its answer and what answers the others.
    The kernel kills this process when one of them exceeds its time."""
    _limit()
    first = _read_frame(requests)
    if first is None:
        return
    opened, answer = open_(first)
    _write_frame(answers, opened)
    while (call := _read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, first["max_cpu_s"])
        answered = answer(call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_frame(answers, answered)


def _limit() -> None:
    for what, limit in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):  # fmt: skip
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (limit, limit) if hard == resource.RLIM_INFINITY else (min(limit, hard),) * 2)


def _read_frame(stream: BinaryIO) -> Frame | None:
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    frame: Frame = json.loads(stream.read(int.from_bytes(header)))
    return frame


def _write_frame(stream: BinaryIO, frame: Frame) -> None:
    stream.write(encode_frame(frame))
    stream.flush()


def encode_frame(frame: Frame) -> bytes:
    """JSON in ASCII, so that any text goes through, with its length before it."""
    data = json.dumps(frame, separators=(",", ":")).encode("ascii")
    return len(data).to_bytes(HEADER_BYTES) + data
