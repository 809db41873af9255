"""A way between a process and a server that a test can break: bytes are swallowed, or held back until it heals.

Swallowed is what a dead network does to those who do not wait for it: nothing arrives, nothing closes, and what was
lost stays lost, so a connection that lost bytes breaks when the way heals. Held back is what TCP does through a short
one: everything arrives, late. (A stopped process is neither: its kernel still takes and keeps what is sent to it.)
Knows nothing of Redis or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from enum import Enum
from urllib.parse import SplitResult, urlsplit

PIECE_BYTES = 1 << 16
UP, DOWN = "up", "down"  # to the server; from it


class Mode(Enum):
    PASS = "passes"
    SWALLOW = "swallows"
    HOLD = "holds back"


@dataclass(eq=False)
class _Connection:
    writers: list[asyncio.StreamWriter]
    damaged: bool = False

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Link:
    """url: of the server, redis:// or unix:// or http://. Use as `async with`; then `url` is this way's own address."""

    def __init__(self, server_url: str) -> None:
        self._server = urlsplit(server_url)
        self._listener: asyncio.Server | None = None
        self._modes = {UP: Mode.PASS, DOWN: Mode.PASS}
        self._passes = asyncio.Event()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_swallowed = 0  # bytes, ever

    async def __aenter__(self) -> Link:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener
        self._listener.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._listener
        user, _, _ = self._server.netloc.rpartition("@")
        where = f"{user + '@' if user else ''}127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        if self._server.scheme == "unix":
            return SplitResult("redis", where, "/0", "", "").geturl()
        return self._server._replace(netloc=where).geturl()

    # --- faults ------------------------------------------------------------------------------------------------------

    def set(self, mode: Mode, directions: Iterable[str] = (UP, DOWN)) -> None:
        """For new connections too: they are taken, and meet the same."""
        for direction in directions:
            self._modes[direction] = mode
        self._passes.set()  # whoever waits looks again
        self._passes = asyncio.Event()
        if Mode.SWALLOW not in self._modes.values():
            for connection in [c for c in self._connections if c.damaged]:
                connection.abort()

    def point_at(self, server_url: str) -> None:
        """For connections from now on; `reset` ends those that there are."""
        self._server = urlsplit(server_url)

    def heal(self) -> None:
        self.set(Mode.PASS)

    def reset(self) -> None:
        """Breaks all connections, audibly."""
        for connection in list(self._connections):
            connection.abort()

    @contextlib.asynccontextmanager
    async def broken(self, mode: Mode = Mode.SWALLOW, directions: Iterable[str] = (UP, DOWN)) -> AsyncIterator[None]:
        self.set(mode, directions)
        try:
            yield
        finally:
            self.heal()

    # --- bytes -------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled: the link is closed
                server_reader, server_writer = await self._connect()
                connection.writers.append(server_writer)
                await asyncio.gather(
                    self._pump(connection, reader, server_writer, UP),
                    self._pump(connection, server_reader, writer, DOWN),
                )
        finally:
            connection.abort()
            for end in connection.writers:
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()
            self._connections.discard(connection)
            self._tasks.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._server.scheme == "unix":
            return await asyncio.open_unix_connection(self._server.path)
        return await asyncio.open_connection(self._server.hostname, self._server.port)

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str
    ) -> None:
        while data := await reader.read(PIECE_BYTES):
            while self._modes[direction] is Mode.HOLD:
                await self._passes.wait()
            if self._modes[direction] is Mode.SWALLOW or connection.damaged:
                connection.damaged = True
                self.num_swallowed += len(data)
                continue
            writer.write(data)
            await writer.drain()
        while self._modes[direction] is not Mode.PASS:  # an end is not heard either
            await self._passes.wait()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()
