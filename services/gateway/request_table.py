"""Which requests are open here, found by what the stream names: a sequence. And which were, a short while ago."""

from __future__ import annotations

import asyncio

from services.gateway.open_request import OpenRequest
from shared.wire import sequence_id

MAX_REMEMBERED = 4096  # ended requests whose late tokens are known to be nobody's


class RequestTable:
    def __init__(self) -> None:
        self._requests: dict[str, OpenRequest] = {}
        self._routes: dict[bytes, tuple[OpenRequest, int]] = {}
        self._followers: set[OpenRequest] = set()
        self._remembered: dict[str, None] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def all(self) -> list[OpenRequest]:
        """A copy, which may be gone through while requests come and go."""
        return list(self._requests.values())

    def find(self, rid: str) -> OpenRequest | None:
        return self._requests.get(rid)

    def __contains__(self, request: OpenRequest) -> bool:
        return self._requests.get(request.rid) is request

    def add(self, request: OpenRequest) -> None:
        self._followers.discard(request)
        self._requests[request.rid] = request
        self._routes |= {sequence_id(request.rid, i).encode(): (request, i) for i in range(request.num_choices)}
        self._empty.clear()

    def remove(self, request: OpenRequest) -> None:
        del self._requests[request.rid]
        for i in range(request.num_choices):
            del self._routes[sequence_id(request.rid, i).encode()]
        self._look_whether_empty()
        if request.admitted:
            self._remembered[request.rid] = None
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]

    def follow(self, request: OpenRequest) -> None:
        """It is open too, and hears of nothing here: another connection is the reader."""
        if not request.abandoned:
            self._followers.add(request)
            self._empty.clear()

    def follow_no_more(self, request: OpenRequest) -> None:
        self._followers.discard(request)
        self._look_whether_empty()

    def _look_whether_empty(self) -> None:
        if not self._requests and not self._followers:
            self._empty.set()

    def route(self, sid: bytes) -> tuple[OpenRequest, int] | None:
        """The request and the number of its choice."""
        return self._routes.get(sid)

    def ended_lately(self, rid: str) -> bool:
        return rid in self._remembered

    async def empty(self) -> None:
        """Returns when no request is open, nor followed."""
        await self._empty.wait()
