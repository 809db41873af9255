"""Renders chat templates in a process that its gateway can kill: `python -m services.gateway.template_process`.

Takes a template, then conversations, on its standard input, and answers on its standard output, one frame each (see
`template_pool.py`, which is the other end). It has no environment, no connection and may write no file; what it may
use of memory and processor time is limited by the kernel, whatever the template does.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO

from services.gateway import chat_template
from services.gateway.chat_template import ChatTemplateError

MAX_MEMORY_BYTES = 1 << 30
HEADER_BYTES = 4


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until the gateway closes its end. The kernel kills this process when a rendering exceeds its time."""
    _limit()
    first = read_frame(requests)
    if first is None:
        return
    source, special_tokens, max_cpu_s = first["source"], first["special_tokens"], first["max_cpu_s"]

    def check() -> str:
        chat_template.check(source)
        return ""

    def render(call: dict[str, Any]) -> str:
        return chat_template.render(
            source, call["messages"], now=datetime.fromisoformat(call["now"]),
            add_generation_prompt=call["add_generation_prompt"], special_tokens=special_tokens,
        )  # fmt: skip

    write_frame(answers, _answer(check))
    while (call := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        answer = _answer(partial(render, call))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, answer)


def _limit() -> None:
    for what, limit in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):  # fmt: skip
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (limit, limit) if hard == resource.RLIM_INFINITY else (min(limit, hard),) * 2)


def _answer(render: Callable[[], str]) -> dict[str, str]:
    try:
        return {"text": render()}
    except ChatTemplateError as e:
        return {"error": e.message}


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    frame: dict[str, Any] = json.loads(stream.read(int.from_bytes(header)))
    return frame


def write_frame(stream: BinaryIO, frame: dict[str, str]) -> None:
    stream.write(encode_frame(frame))
    stream.flush()


def encode_frame(frame: dict[str, Any]) -> bytes:
    """JSON in ASCII, so that any text goes through, with its length before it."""
    data = json.dumps(frame, separators=(",", ":")).encode("ascii")
    return len(data).to_bytes(HEADER_BYTES) + data


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
