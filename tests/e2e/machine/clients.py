"""A client of a gateway without HTTP: what it asks, what it has been given, and how that ended.

Does what `services.gateway.generation` does with a request, without text: a stop string is a number of tokens.
"""

from __future__ import annotations

import asyncio

from services.gateway.admission import TryLater
from services.gateway.inflight import Inflight
from services.gateway.open_request import Moved, OpenRequest, RequestLost
from shared.protocol import Outcome, TokenChunk
from shared.wire import pack_ids
from tests.e2e.machine.oracle import Wanted


class Client:
    """end: "" while open; else refused, complete, failed, gone (by its own will or its gateway's), moved,
    forgotten."""

    def __init__(self, wanted: Wanted, inflight: Inflight) -> None:
        self.wanted = wanted
        self.inflight = inflight
        self.open: OpenRequest | None = None
        self.end = ""
        self.tokens: list[list[int]] = [[] for _ in range(wanted.num_choices)]
        self.ended = [False] * wanted.num_choices
        self._wake = asyncio.Event()

    @property
    def can_take(self) -> bool:
        return self.open is not None and not self.end

    async def submit(self) -> None:
        wanted = self.wanted
        try:
            [request] = await self.inflight.submit([(wanted.spec, pack_ids(wanted.prompt))], "owner", self._wake)
        except TryLater:
            self.end = "refused"
            wanted.may_be_cancelled = True  # an admission that was never answered may have happened
            return
        if self.end:
            self.inflight.close(request)
        else:
            self.open = request

    async def come_back(self) -> None:
        """Asks for all of the answer again, where another client, or itself, has had some of it."""
        wanted = self.wanted
        try:
            request = await self.inflight.attach(wanted.rid, wanted.num_choices, self._wake)
        except TryLater:
            self.end = "refused"
            wanted.may_be_cancelled = True
            return
        except (Moved, RequestLost) as e:
            self.end = "moved" if isinstance(e, Moved) else "forgotten"
            return
        if self.end:
            self.inflight.client_left(request)
        else:
            self.open = request

    def leave(self) -> None:
        """The client hangs up."""
        if self.end:
            return
        self.end = "gone"
        self.wanted.may_be_cancelled = True
        if self.open is not None:
            self.inflight.close(self.open)

    async def take(self) -> None:
        assert self.open is not None
        try:
            events = await self.inflight.take(self.open)
        except Moved:
            self._close("moved")
            return
        except RequestLost as e:
            raise AssertionError(f"{self.wanted.rid} was lost") from e
        for choice, item in events:
            if self.end or self.ended[choice]:
                continue
            if isinstance(item, TokenChunk):
                self._feed(choice, item)
            else:
                self._outcome(choice, item)
        if not self.end and all(self.ended):
            self._close("complete")

    def _feed(self, choice: int, chunk: TokenChunk) -> None:
        tokens, wanted = self.tokens[choice], self.wanted
        assert chunk.first == len(tokens), f"{wanted.rid}.{choice}: given {chunk.first} after {len(tokens)} tokens"
        tokens += chunk.ids
        answer, _ = wanted.answer(choice)
        assert tokens == answer[: len(tokens)], f"{wanted.rid}.{choice}: given {tokens}, wanted {answer}"
        stop_after = wanted.stop_after
        if stop_after is None or len(tokens) < stop_after:
            self.ended[choice] = bool(chunk.finish)
            return
        del tokens[stop_after:]
        self.ended[choice] = True
        assert self.open is not None
        if chunk.finish:
            self.open.open_choices.discard(choice)
        else:
            self.inflight.finish(self.open, choice, Outcome(reason="stop", num_tokens=stop_after))

    def _outcome(self, choice: int, outcome: Outcome) -> None:
        self.ended[choice] = True
        if outcome.reason not in ("stop", "length"):
            self.wanted.may_be_cancelled = True  # one choice has failed, and with it the call
            self._close("failed")

    def _close(self, end: str) -> None:
        assert self.open is not None
        self.end = end
        self.inflight.close(self.open)
        if end == "complete":
            shown = [self.wanted.shown(choice) for choice in range(self.wanted.num_choices)]
            assert [len(t) for t in self.tokens] == shown, f"{self.wanted.rid}: an end after too few tokens"
