"""A client behind a load balancer: asks any gateway that listens, and takes up at another what one has left.

Uses what the product offers for that: `Idempotency-Key`, by which a repeated call joins the first one, and
`Last-Event-ID`, by which a stream goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from tests.e2e.clients import Answer, Client, Json, path_of, read_events, take_whole
from tests.e2e.stack import Stack

AGAIN_S = 0.05
TRANSIENT = (502, 503)


def listening(stack: Stack) -> list[str]:
    """What a load balancer knows: the gateways that have not been told to stop."""
    gateways = [p for p in stack.processes("gateway") if p.port and not p.expected_to_end]
    return [stack.url_of(p.index) for p in gateways]


class BalancedClient:
    """urls: of the gateways that listen now."""

    def __init__(self, client: Client, urls: Callable[[], Sequence[str]]) -> None:
        self._session = client.session
        self._urls = urls
        self._turns = itertools.count()
        self.num_resumed = 0
        self.num_repeated = 0

    async def ask(self, body: Json) -> Answer:
        """The answer, whole, however often a gateway leaves meanwhile."""
        answer, key = Answer(body, sent_at=time.perf_counter()), secrets.token_hex(8)
        is_first = True
        while not (answer.done if body.get("stream") else answer.choices) and answer.error is None:
            if not is_first:
                await asyncio.sleep(AGAIN_S)
            is_first = False
            urls = self._urls()
            if urls:
                await self._try(urls[next(self._turns) % len(urls)], answer, key)
        return answer

    async def ask_all(self, bodies: list[Json]) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(body) for body in bodies)))

    def _request(self, url: str, answer: Answer, key: str) -> Any:
        if answer.last_event_id:
            self.num_resumed += 1
            path = f"/v1/streams/{answer.last_event_id.partition(':')[0]}"
            return self._session.get(url + path, headers={"Last-Event-ID": answer.last_event_id})
        self.num_repeated += answer.status != 0
        return self._session.post(url + path_of(answer.body), json=answer.body, headers={"Idempotency-Key": key})

    async def _try(self, url: str, answer: Answer, key: str) -> None:
        try:
            async with self._request(url, answer, key) as response:
                if response.status in TRANSIENT:
                    return
                answer.status, answer.headers = response.status, response.headers
                if response.content_type == "text/event-stream":
                    await read_events(response, answer)
                else:
                    take_whole(answer, await response.json())
        except (aiohttp.ClientError, ConnectionError):
            pass
