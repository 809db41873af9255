"""A Redis client that spends a quarter of redis-py's time on a command: one connection, commands sent without waiting.

redis-py takes a connection out of its pool for each command, and several tasks and timers to write and read; a service
makes thousands of calls a minute, beside an engine that wants the cores. Here commands of all tasks share a link, and
replies come back in order; one that blocks has a link to itself. Addresses, TLS, passwords and the meaning of replies
stay redis-py's. Knows no command but those that block.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import DefaultParser, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError, InvalidResponse, TimeoutError

BLOCKING = ("XREAD", "XREADGROUP")


class Link(asyncio.Protocol):
    """One connection. A reply that nobody waits for any more is dropped when it comes."""

    _transport: asyncio.Transport

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=DefaultParser.parse_error)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # with the time by which it must come
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def send(self, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """The reply, or the exception that it is. A command may be two words."""
        if not self.is_open:
            raise ConnectionError("the connection to Redis is lost")  # between two steps of the caller
        if " " in args[0]:
            args = (*args[0].split(), *args[1:])
        data = hiredis.pack_command(args)  # may fail: nothing may wait for an answer yet, it would be another's
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((future, self._loop.time() + self._timeout_s))
        self._transport.write(data)
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._look)
        return future

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                future, _ = self._waiting.popleft()
                if not future.done():
                    future.set_result(reply)
        except (InvalidResponse, IndexError) as e:
            self.close(ConnectionError(f"Redis sent what is no reply: {e}"))

    def eof_received(self) -> None:
        self.close(ConnectionError("Redis has closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(ConnectionError(f"the connection to Redis is lost: {exc or 'closed'}"))

    def _look(self) -> None:
        """One timer for all commands."""
        self._watch = None
        if not self._waiting:
            return
        left = self._waiting[0][1] - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self.close(TimeoutError("Redis does not answer"))

    def close(self, why: Exception) -> None:
        """What is under way fails: it may or may not have been carried out."""
        self.is_open = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(why)
        self._transport.abort()

    async def call(self, *args: Any) -> Any:
        reply = await self.send(args)
        if isinstance(reply, Exception):
            raise reply
        return reply


class LinkedRedis(Redis):
    """Links are made when they are first needed, and anew after one is lost."""

    _shared: Link | None = None
    _connecting: asyncio.Future[Link] | None = None
    _spare: Link | None = None  # for the next command that blocks

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] in BLOCKING and b"BLOCK" in args:
            reply = await self._block(args)
        else:
            link = self._shared
            if link is None or not link.is_open:
                link = await self._connected()
            reply = await link.call(*args)
        callback = self.response_callbacks.get(args[0])
        options.pop("keys", None)  # redis-py's own business
        return reply if callback is None else callback(reply, **options)

    async def _block(self, args: tuple[Any, ...]) -> Any:
        """On a link that is given up if the caller goes away: the next command there would wait for this one."""
        link, self._spare = self._spare, None
        if link is None or not link.is_open:
            link = await self._connect()
        try:
            return await link.call(*args)
        finally:
            if link.is_open and link.is_idle and self._spare is None:
                self._spare = link
            else:
                link.close(ConnectionError("given up"))

    async def _connected(self) -> Link:
        """The shared link; all who need it wait for the one that is being made."""
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect())
            self._connecting.add_done_callback(self._made)
        return await asyncio.shield(self._connecting)

    def _made(self, connecting: asyncio.Future[Link]) -> None:
        self._connecting = None
        if not connecting.cancelled() and connecting.exception() is None:
            self._shared = connecting.result()

    async def _connect(self) -> Link:
        pool: Any = self.connection_pool
        to = pool.make_connection()  # what redis-py would connect to; it stays unconnected
        loop = asyncio.get_running_loop()

        def new_link() -> Link:
            return Link(to.socket_timeout)

        async with asyncio.timeout(to.socket_connect_timeout):
            if isinstance(to, UnixDomainSocketConnection):
                _, link = await loop.create_unix_connection(new_link, to.path)
            else:
                ssl = to.ssl_context.get() if isinstance(to, SSLConnection) else None
                _, link = await loop.create_connection(new_link, to.host, to.port, ssl=ssl)
            try:
                if to.password:
                    await link.call("AUTH", *([to.username] if to.username else []), to.password)
                if to.db:
                    await link.call("SELECT", to.db)
            except BaseException:
                link.close(ConnectionError("given up"))
                raise
        return link

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        for link in (self._shared, self._spare):
            if link is not None:
                link.close(ConnectionError("the client is closed"))
        self._shared = self._spare = None
        await super().aclose(close_connection_pool)
