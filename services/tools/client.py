"""A client that reads an answer to its end although gateways die: it comes back where it was, at any of their URLs.

    async with StreamClient(["http://one:8000", "http://two:8000"]) as client:
        async for chunk in client.stream("/v1/chat/completions", {"messages": [...]}):
            ...

Works with any OpenAI-style server; to one that sends no event ids it cannot come back. What is in the events is the
caller's to understand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import aiohttp

from shared.bus import backoff

CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 1 << 20
RESUME_S = 20  # how long the server goes on while this client is away
PATIENCE_S = 30.0  # for a gateway to come back
CANCEL_TIMEOUT_S = 2.0
BROKEN_OFF = "the connection was lost in the middle of the answer"


class AnswerError(Exception):
    """Why there is no answer, or no more of it; one sentence for people. code: the server's name for it."""

    def __init__(self, message: str, code: object = "") -> None:
        super().__init__(message)
        self.code = str(code)


class Busy(AnswerError):
    """This gateway cannot answer now; another, or it later, may."""


LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, Busy)


class StreamClient:
    """Used from one event loop, as a context manager. urls: of gateways that serve the same, or of what stands before
    them; the first is asked first."""

    def __init__(self, urls: Sequence[str], api_key: str = "") -> None:
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> StreamClient:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=MAX_EVENT_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def get(self, path: str) -> Any:
        """The JSON of a page."""
        for url in self._urls[:-1]:
            with contextlib.suppress(*LOST):
                return await self._get(url + path)
        try:
            return await self._get(self._urls[-1] + path)
        except Busy:
            raise
        except LOST as e:
            raise self._unreachable() from e

    async def _get(self, url: str) -> Any:
        async with self._request("GET", url) as response:
            return await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON values of an answer's events, each once. AnswerError when it fails or breaks off for good.

        A caller that leaves it before its end cancels the request; use `contextlib.aclosing` to do so at once.
        """
        answer = _Answer(path, body)
        try:
            async for _ in backoff():
                try:
                    async for value in self._read(answer):
                        yield value
                    return
                except LOST as e:
                    self._urls.append(self._urls.pop(0))
                    answer.lost(e)
                    if not answer.may_be_asked_again(len(self._urls)):
                        raise (e if isinstance(e, Busy) else self._given_up(answer)) from e
        finally:
            if answer.rid and not answer.done:
                await self._cancel(answer.rid)

    async def _read(self, answer: _Answer) -> AsyncIterator[Any]:
        async with self._request(answer.method, self._urls[0] + answer.path, **answer.options()) as response:
            answer.heard()
            async for line in response.content:
                if line.startswith(b"id:"):
                    answer.place = line[3:].strip().decode()
                elif line.startswith(b"data:"):
                    value = _value(line[5:].strip())
                    answer.heard()
                    if value is None:
                        answer.done = True
                        return
                    answer.has_begun = True
                    yield value
        raise aiohttp.ClientPayloadError(BROKEN_OFF)

    def _given_up(self, answer: _Answer) -> AnswerError:
        return AnswerError(BROKEN_OFF) if answer.is_asked else self._unreachable()

    def _unreachable(self) -> AnswerError:
        return AnswerError(f"nothing answers at {' or '.join(sorted(self._urls))}; is `headrace serve` running?")

    async def _cancel(self, rid: str) -> None:
        assert self._session
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self._session.delete(f"{self._urls[0]}/v1/streams/{rid}")

    @contextlib.asynccontextmanager
    async def _request(self, method: str, url: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session
        try:
            async with self._session.request(method, url, **options) as response:
                if response.status != 200:
                    body = await response.json() if response.content_type == "application/json" else None
                    error = _error(body, f"the server answered {response.status} {response.reason}")
                    raise Busy(str(error), error.code) if response.status in (502, 503, 504) else error
                yield response
        except LOST:
            raise
        except (aiohttp.ClientError, ValueError) as e:
            raise AnswerError(f"the server's answer cannot be read: {e or type(e).__name__}") from e


class _Answer:
    """How far an answer is, and what to ask for to have the rest of it."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self._path = path
        self._body = body | {"stream": True}
        self._key = secrets.token_urlsafe(16)  # a call that is repeated has one answer
        self._heard_at = time.monotonic()
        self.is_asked = False  # a server may know of it
        self.has_begun = False
        self.done = False
        self.place = ""  # the id of the last event
        self.num_failed = 0  # tries since something was heard

    @property
    def rid(self) -> str:
        """The server's name for it; empty while it is not known."""
        return self.place.rpartition(":")[0]

    @property
    def method(self) -> str:
        return "GET" if self.rid else "POST"

    @property
    def path(self) -> str:
        return f"/v1/streams/{self.rid}" if self.rid else self._path

    def options(self) -> dict[str, Any]:
        headers = {"X-Headrace-Resume": str(RESUME_S)}
        if self.rid:
            return {"headers": headers | {"Last-Event-ID": self.place}}
        return {"headers": headers | {"Idempotency-Key": self._key}, "json": self._body}

    def heard(self) -> None:
        self._heard_at = time.monotonic()
        self.is_asked = True
        self.num_failed = 0

    def lost(self, error: BaseException) -> None:
        self.num_failed += 1
        self.is_asked = self.is_asked or not isinstance(error, aiohttp.ClientConnectorError | Busy)

    def may_be_asked_again(self, num_urls: int) -> bool:
        """Not where part of the answer is here and the rest has no name; but once where no server has taken it yet."""
        if self.has_begun and not self.rid:
            return False
        return self.num_failed < num_urls or (self.is_asked and time.monotonic() < self._heard_at + PATIENCE_S)


def _value(data: bytes) -> Any:
    """Of an event; None at the end of the stream."""
    if data == b"[DONE]":
        return None
    value = json.loads(data)
    if "error" in value:
        raise _error(value, "the answer broke off")
    return value


def _error(body: Any, default: str) -> AnswerError:
    """From an error body in OpenAI's shape."""
    with contextlib.suppress(KeyError, TypeError):
        return AnswerError(str(body["error"]["message"]), body["error"].get("code", ""))
    return AnswerError(default)
