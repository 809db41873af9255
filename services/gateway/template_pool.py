"""Renders chat templates outside of this process: in a few child processes, started when needed, killed when they hang.

A template is code from a model's files, run on what clients send, and no sandbox bounds its time. So it runs where
nothing else does: a rendering that takes too long costs its own child and its own request. Owns the children; what is
rendered, and how, is `chat_template.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from services.gateway.admission import unavailable
from services.gateway.chat_template import CANNOT_RENDER, MAX_OUTPUT_CHARS, ChatTemplateError, Message
from services.gateway.template_process import HEADER_BYTES, encode_frame
from shared import launcher
from shared.runtime import wait_for_event

log = logging.getLogger(__name__)

NUM_CHILDREN = 2  # so that one that hangs does not hold up the others
START_AFTER_S = 0.05  # an ordinary rendering is over sooner than another child has started
MAX_CPU_S = 1.0  # of one rendering; an ordinary one takes far below a millisecond
RENDER_TIMEOUT_S = 10.0  # on a machine where the child gets no processor; its own time is limited by the kernel before
WAIT_TIMEOUT_S = 10.0  # for a child that has nothing to do
MAX_FRAME_BYTES = 6 * MAX_OUTPUT_CHARS + 1024  # a character is at most six bytes of JSON
TREE = Path(__file__).parents[2]


class _Died(ChatTemplateError):
    """A child has ended for another reason than its time."""


class TemplatePool:
    """For one template, that of the served model. A child lives as long as it answers."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], render_timeout_s: float = RENDER_TIMEOUT_S,
        max_cpu_s: float = MAX_CPU_S,
    ) -> None:  # fmt: skip
        self._first = encode_frame({"source": source, "special_tokens": dict(special_tokens), "max_cpu_s": max_cpu_s})
        self._timeout_s = render_timeout_s
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._returned = asyncio.Event()  # some child has done its work
        self._free = asyncio.Semaphore(NUM_CHILDREN)
        self._tasks: set[asyncio.Task[bytes]] = set()

    async def start(self) -> None:
        """The first child, so that no request waits for it; ChatTemplateError if the template does not compile."""
        async with self._free:
            self._idle.append(await self._new_child())

    async def render(self, call: bytes) -> bytes:
        """From `encode_call` to what `text_of` takes, since both may take long for a long conversation.

        ChatTemplateError when the time is over, TryLater while all children are busy. A caller that is cancelled
        leaves a rendering that goes on to its end or its limit: half an answer in a pipe would be the next caller's.
        """
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError:
            raise unavailable("too many chat templates are being rendered", "busy") from None
        task = asyncio.ensure_future(self._render(call))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        self._tasks.discard(task)
        self._free.release()
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _render(self, call: bytes) -> bytes:
        """By a child that is there, unless it has died meanwhile (memory may be short); else by a new one."""
        await self._wait_for_idle(START_AFTER_S)
        while True:
            while self._idle:
                with contextlib.suppress(_Died):
                    return await self._answer_of(self._idle.pop(), call)
            try:
                child = await self._new_child()
            except OSError as e:  # there is no descriptor, no memory or no process left for it
                log.warning("no other process for chat templates can be started: %s", e)
                await self._wait_for_idle(self._timeout_s)
                if not self._idle:
                    raise unavailable("no chat template can be rendered now", "busy") from None
                continue
            return await self._answer_of(child, call)

    async def _wait_for_idle(self, timeout_s: float) -> None:
        """For a child that works, if there is one and no other."""
        if not self._idle and self._all:
            self._returned.clear()
            await wait_for_event(self._returned, timeout_s)

    async def _answer_of(self, child: Process, call: bytes) -> bytes:
        try:
            answer = await self._ask(child, call)
        except BaseException:
            await self._kill(child)
            raise
        self._idle.append(child)
        self._returned.set()
        return answer

    async def _new_child(self) -> Process:
        argv = launcher.command([sys.executable, "-m", "services.gateway.template_process"], signal.SIGKILL)
        environ = {"PYTHONPATH": str(TREE), "PYTHONSAFEPATH": "1"}  # and nothing of this process' own
        # its errors would quote what clients have sent
        child = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environ)
        self._all.add(child)
        try:
            text_of(await self._ask(child, self._first))
        except BaseException:
            await self._kill(child)
            raise
        return child

    async def _ask(self, child: Process, frame: bytes) -> bytes:
        assert child.stdin is not None and child.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                child.stdin.write(frame)
                await child.stdin.drain()
                size = int.from_bytes(await child.stdout.readexactly(HEADER_BYTES))
                if size > MAX_FRAME_BYTES:
                    raise ChatTemplateError("the chat template's text is too long", param="messages")
                return await child.stdout.readexactly(size)
        except TimeoutError as e:
            raise _too_long() from e
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            if await child.wait() == -signal.SIGPROF:
                raise _too_long() from e
            raise _Died(CANNOT_RENDER, param="messages") from e

    async def _kill(self, child: Process) -> None:
        self._all.discard(child)
        if child.returncode is None:
            child.kill()
        await child.wait()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in list(self._all):
            await self._kill(child)


def _too_long() -> ChatTemplateError:
    log.warning("a chat template took too long; its process is ended")
    return ChatTemplateError("the model's chat template takes too long for these messages", param="messages")


def encode_call(messages: Sequence[Message], now: datetime, *, add_generation_prompt: bool = True) -> bytes:
    return encode_frame(
        {"messages": list(messages), "now": now.isoformat(), "add_generation_prompt": add_generation_prompt}
    )


def text_of(answer: bytes) -> str:
    """The prompt's text; ChatTemplateError where the template has none for these messages."""
    fields = json.loads(answer)
    if "error" in fields:
        raise ChatTemplateError(str(fields["error"]), param="messages")
    return str(fields["text"])
