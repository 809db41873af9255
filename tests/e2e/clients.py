"""A client that records what it is sent and when, and checks what holds for every answer, whatever happens behind it.

Raw HTTP and server-sent events by aiohttp; the official client has tests of its own (`test_openai_client.py`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from tests.safe_errors import check_safe

Json = dict[str, Any]
T = TypeVar("T")

TIMEOUT_S = 25.0  # of a whole answer; below the limit of a test


@dataclass
class Choice:
    """One choice as the client has it. positions: the committed tokens at each of its events."""

    text: str = ""
    finish_reason: str | None = None
    positions: list[int] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)  # with log-probabilities, where asked for

    @property
    def position(self) -> int:
        return self.positions[-1] if self.positions else 0


@dataclass
class Answer:
    """What came of one request. `error`: the body or the event that says so; `broken`: why it ended early."""

    body: Json
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Json | None = None
    error: Json | None = None
    done: bool = False
    broken: str = ""
    id: str = ""
    last_event_id: str = ""
    lines: list[str] = field(default_factory=list)  # the data of all events
    sent_at: float = 0.0
    event_times: list[float] = field(default_factory=list)

    @property
    def rid(self) -> str:
        return self.headers["X-Request-Id"]

    @property
    def position(self) -> int:
        return sum(c.position for c in self.choices.values())

    @property
    def text(self) -> str:
        return self.choices[0].text

    def longest_pause_s(self, since: float = 0.0) -> float:
        """Between two events, of which the later came after `since`."""
        times = [self.sent_at, *self.event_times]
        return max((b - a for a, b in zip(times, times[1:], strict=False) if b > since), default=0.0)

    def essence(self) -> Any:
        """What must not depend on anything but the request: all choices, and the tokens that are counted."""
        choices = {i: (c.text, c.finish_reason, c.tokens) for i, c in sorted(self.choices.items())}
        counted = ("prompt_tokens", "completion_tokens", "completion_tokens_details")
        return choices, [self.usage.get(name) for name in counted] if self.usage else None

    def check(self) -> None:
        """A whole answer: invariants 2, 3 and 5 of one client."""
        assert self.status == 200 and self.error is None and not self.broken, (self.status, self.error, self.broken)
        assert sorted(self.choices) == list(range(num_choices(self.body))), sorted(self.choices)
        for choice in self.choices.values():
            assert choice.finish_reason in ("stop", "length"), choice
            assert choice.positions == sorted(choice.positions), choice.positions
        if self.usage:
            usage = self.usage
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        if self.body.get("stream"):
            assert self.done, "no [DONE]"
            if self.usage:
                assert self.position == self.usage["completion_tokens"], (self.position, self.usage)


def check_same(answers: Sequence[Answer], undisturbed: Sequence[Answer]) -> None:
    """Whole answers, and the same as when nothing happened."""
    for answer, same in zip(answers, undisturbed, strict=True):
        answer.check()
        assert answer.essence() == same.essence()


def longest_pause_s(answers: Iterable[Answer], since: float = 0.0) -> float:
    """Of any client that was streamed to."""
    return max(a.longest_pause_s(since) for a in answers if a.body.get("stream"))


def num_choices(body: Json) -> int:
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return int(body.get("n") or 1) * (len(prompt) if many and prompt is not None else 1)


def path_of(body: Json) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


class Client:
    """on_event, if given, is called after each event with the answer so far. No connection is used twice, so that no
    answer depends on the one before it."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))
        self.url = url
        self._tasks: list[asyncio.Future[Any]] = []

    async def ask(self, body: Json, on_event: Callable[[Answer], None] | None = None, **options: Any) -> Answer:
        """The answer, also one that is an error or breaks off."""
        answer = Answer(body, sent_at=time.perf_counter())
        try:
            async with self.session.post(self.url + path_of(body), json=body, **options) as response:
                answer.status, answer.headers = response.status, response.headers
                if response.content_type == "text/event-stream":
                    await read_events(response, answer, on_event)
                else:
                    take_whole(answer, await response.json())
                if answer.error is not None:
                    check_safe(answer.error)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as e:
            answer.broken = type(e).__name__
        return answer

    async def take_up(self, answer: Answer, on_event: Callable[[Answer], None] | None = None, **options: Any) -> Answer:
        """Goes on with one that broke off, at this client's gateway."""
        answer.broken = ""
        headers = {"Last-Event-ID": answer.last_event_id} if answer.last_event_id else {}
        try:
            url = f"{self.url}/v1/streams/{answer.last_event_id.partition(':')[0] or answer.rid}"
            async with self.session.get(url, headers=headers, **options) as response:
                answer.status = response.status
                if response.content_type == "text/event-stream":
                    await read_events(response, answer, on_event)
                else:
                    take_whole(answer, await response.json())
                if answer.error is not None:
                    check_safe(answer.error)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as e:
            answer.broken = type(e).__name__
        return answer

    async def ask_all(self, bodies: list[Json]) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(body) for body in bodies)))

    def begin(
        self, body: Json, on_event: Callable[[Answer], None] | None = None, **options: Any
    ) -> asyncio.Future[Answer]:
        """As `ask`, in the background; what still runs when the client is closed is cancelled."""
        return self.keep(self.ask(body, on_event, **options))

    def begin_all(self, bodies: list[Json]) -> asyncio.Future[list[Answer]]:
        return self.keep(self.ask_all(bodies))

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as response:
            body = await response.json(content_type=None)
            if response.status >= 400:
                check_safe(body)
            return response.status, body

    async def post(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, **options) as response:
            body = await response.json(content_type=None)
            if response.status >= 400:
                check_safe(body)
            return response.status, body


Connect = Callable[..., Client]  # the fixture `connect`


async def read_events(
    response: aiohttp.ClientResponse, answer: Answer, on_event: Callable[[Answer], None] | None = None
) -> None:
    place = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("id: "):
            place = answer.last_event_id = line[4:]
        if not line.startswith("data: "):
            continue
        assert not answer.done, f"after [DONE]: {line}"
        answer.event_times.append(time.perf_counter())
        answer.lines.append(line[6:])
        if line == "data: [DONE]":
            answer.done = True
            assert place.endswith(":end"), place
            continue
        event = json.loads(line[6:])
        if "error" in event:
            answer.error = event["error"]
        else:
            _take_event(answer, event, place)
        if on_event is not None:
            on_event(answer)


def _take_event(answer: Answer, event: Json, place: str) -> None:
    assert answer.id in ("", event["id"])
    answer.id, answer.usage = event["id"], event.get("usage") or answer.usage
    places = place.partition(":")[2].split(",")
    for part in event["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        assert choice.finish_reason is None, f"after the end of choice {part['index']}: {part}"
        choice.text += part["delta"].get("content", "") if "delta" in part else part["text"]
        choice.finish_reason = part["finish_reason"]
        choice.tokens += _tokens(part["logprobs"])
        if len(places) == num_choices(answer.body):
            choice.positions.append(int(places[part["index"]].rstrip("e")))


def take_whole(answer: Answer, body: Json) -> None:
    if answer.status != 200:
        answer.error = body["error"]
        return
    answer.id, answer.usage = body["id"], body["usage"]
    for part in body["choices"]:
        text = part["message"]["content"] if "message" in part else part["text"]
        answer.choices[part["index"]] = Choice(text, part["finish_reason"], tokens=_tokens(part["logprobs"]))


def _tokens(logprobs: Json | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(row) for row in zip(*(logprobs[f] for f in fields), strict=True)]
