"""What a client has and what it is sent when it comes back are together what it would have been sent, whatever event it
had last: for any requests, tokens and orders of arrival, of chat and completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway import answer, sse
from services.gateway.answer import Answer
from services.gateway.generation import Caller, Generation
from services.gateway.inflight import Inflight
from services.gateway.metrics_defs import GatewayMetrics
from services.gateway.open_request import Event, OpenRequest
from services.gateway.preparation import PreparedPrompt
from services.gateway.resuming import Places
from services.gateway.state import GatewayState
from shared.protocol import Outcome, RequestSpec, SamplingParams, TextParams, TimeLimits, TokenChunk
from tests.gateway.tiny_tokenizers import tiny_tokenizer

PIECES = [b"a", b"b", b" c", b"ab", b"\n", "é".encode(), b"\xf0\x9f", b"\xa6", b"\x8a", b"\xff", b"", b"<"]
TOKENIZER = tiny_tokenizer(PIECES, ["<s>", "<e>"], bos="<s>")
EOS = len(PIECES) + 1
METRICS = GatewayMetrics()
STOPS = st.text("ab c\n<", min_size=1, max_size=3) | st.sampled_from(["é", "🦊", "<e>"])


@dataclass(frozen=True)
class Call:
    """chunks: of each choice, in the order of its log; order: which choice's next chunk arrives, one after another."""

    prompts: tuple[PreparedPrompt, ...]
    chunks: tuple[tuple[TokenChunk, ...], ...]
    order: tuple[int, ...]

    def batches(self, sizes: Sequence[int]) -> list[list[tuple[int, TokenChunk]]]:
        """What arrives, in its order, so many at a time."""
        left, arrivals = [list(chunks) for chunks in self.chunks], []
        for choice in [*self.order, *range(len(left))] * 40:
            if left[choice % len(left)]:
                arrivals.append((choice % len(left), left[choice % len(left)].pop(0)))
        assert not any(left)
        batches: list[list[tuple[int, TokenChunk]]] = []
        for size in [*sizes, *[1] * len(arrivals)]:
            batches.append(arrivals[:size])
            arrivals = arrivals[size:]
        return [batch for batch in batches if batch]


class ToldInflight:
    """Hands out what a test says, batch by batch, of requests of one call."""

    def __init__(self, call: Call, batches: Sequence[list[tuple[int, TokenChunk]]]) -> None:
        self._batches = [list(batch) for batch in batches]
        self._firsts: dict[str, int] = {}
        self._num_choices = 0

    def _open(self, rid: str, num_choices: int, wake: asyncio.Event) -> OpenRequest:
        self._firsts[rid] = self._num_choices
        self._num_choices += num_choices
        wake.set()
        return OpenRequest(rid, num_choices, "g", wake)

    async def submit(
        self, specs: list[tuple[RequestSpec, bytes]], owner: str, wake: asyncio.Event, **_: Any
    ) -> list[OpenRequest]:
        return [self._open(spec.rid, spec.num_choices, wake) for spec, _ in specs]

    async def attach(self, rid: str, num_choices: int, wake: asyncio.Event, **_: Any) -> OpenRequest:
        return self._open(rid, num_choices, wake)

    async def take(self, request: OpenRequest) -> list[Event]:
        first = self._firsts[request.rid]
        mine = range(first, first + request.num_choices)
        batch = self._batches[0] if self._batches else []
        events: list[Event] = [(choice - first, chunk) for choice, chunk in batch if choice in mine]
        batch[:] = [(choice, chunk) for choice, chunk in batch if choice not in mine]
        if self._batches and not batch:
            self._batches.pop(0)
        request.wake.set()
        return events

    def finish(self, request: OpenRequest, choice: int, outcome: Outcome) -> None:
        pass

    def end_if_never_placed(self, request: OpenRequest, choice: int, outcome: Outcome) -> None:
        pass

    def close(self, request: OpenRequest, outcome: Outcome) -> None:
        pass


async def answered(call: Call, sizes: Sequence[int], places: Places | None = None) -> list[tuple[str, str]]:
    """The events that are sent, by id and data."""
    inflight = cast(Inflight, ToldInflight(call, call.batches(sizes)))
    generation = Generation(
        inflight, METRICS, TOKENIZER, call.prompts, rid="r", caller=Caller("o", bytes(32)),
        time_limits=TimeLimits(), started=0, places=places,
    )  # fmt: skip
    sent = b""
    async with generation:
        state = cast(GatewayState, type("State", (), {"model": "m"}))
        out = Answer(generation, answer._builder(state, TOKENIZER, generation))
        while generation.is_running:
            sent += out._events(await generation.next())
        sent += out._ending()
    return [parsed(event) for event in sent.decode().split("\n\n") if event]


def parsed(event: str) -> tuple[str, str]:
    id, data = event.split("\n")
    return id.removeprefix("id: "), data.removeprefix("data: ")


def by_choice(events: Sequence[tuple[str, str]]) -> dict[Any, list[Any]]:
    """The data of all events, in order, of each choice and of none (usage and the end)."""
    found: dict[Any, list[Any]] = {}
    for _, data in events:
        value = data if data == "[DONE]" else json.loads(data)
        index = value["choices"][0]["index"] if isinstance(value, dict) and value["choices"] else None
        found.setdefault(index, []).append(value)
    return found


def of_prompt(first: int, ids: Sequence[int], finish: str = "") -> TokenChunk:
    logprobs = tuple((-0.25 * i, ((i, -0.25 * i),)) for i in ids)
    return TokenChunk(first=first, ids=tuple(ids), logprobs=logprobs, ranks=tuple(ids), finish=finish)


@st.composite
def prompt_logs(draw: st.DrawFn, ids: Sequence[int], sampling: SamplingParams) -> tuple[TokenChunk, ...]:
    if sampling.prompt_logprobs is None:
        return ()
    finish = "" if sampling.max_tokens else "length"
    if draw(st.booleans()):
        return (of_prompt(-2, ids[1:], finish),)
    return of_prompt(-2, ids[1:2]), of_prompt(-1, ids[2:], finish)


@st.composite
def logs(draw: st.DrawFn, with_logprobs: bool) -> tuple[TokenChunk, ...]:
    ids = draw(st.lists(st.integers(0, EOS), min_size=1, max_size=8))
    edges = sorted({0, len(ids), *draw(st.lists(st.integers(0, len(ids)), max_size=5))})
    ends_alone = draw(st.booleans())
    chunks = [
        TokenChunk(
            first=a, ids=tuple(ids[a:b]), cached_tokens=1 if a == 0 else 0,
            logprobs=tuple((-0.5 * i, ((0, -1.0),)) for i in range(a, b)) if with_logprobs else None,
            finish="" if ends_alone or b < len(ids) else "length",
        )
        for a, b in zip(edges, edges[1:], strict=False)
    ]  # fmt: skip
    if ends_alone:
        chunks.append(TokenChunk(first=len(ids), ids=(), finish="length"))
    return tuple(chunks)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    api = draw(st.sampled_from(["chat", "completions"]))
    num_prompts = 1 if api == "chat" else draw(st.integers(1, 2))
    num_choices = draw(st.integers(1, 3))
    text = TextParams(
        api=api, stream=True, include_usage=draw(st.booleans()), created=1,
        stop=draw(st.lists(STOPS, max_size=2)),
        include_stop_str_in_output=draw(st.booleans()), skip_special_tokens=draw(st.booleans()),
        echo=api == "completions" and draw(st.booleans()), return_token_ids=draw(st.booleans()),
    )  # fmt: skip
    with_logprobs = draw(st.booleans())
    scored = text.echo and with_logprobs
    sampling = SamplingParams(
        max_tokens=draw(st.integers(0 if scored else 1, 10)), min_tokens=draw(st.integers(0, 1)), seed=0,
        stop_token_ids=(EOS,), logprobs=1 if with_logprobs else None, prompt_logprobs=1 if scored else None,
    )  # fmt: skip
    prompts = tuple(PreparedPrompt([0, 1, 2 + i], sampling, text, num_choices) for i in range(num_prompts))
    chunks = tuple(
        draw(prompt_logs(prompt.ids, sampling)) + (draw(logs(with_logprobs)) if sampling.max_tokens else ())
        for prompt in prompts
        for _ in range(num_choices)
    )
    return Call(prompts, chunks, tuple(draw(st.lists(st.integers(0, 5), max_size=12))))


@settings(max_examples=150, deadline=None)
@given(calls(), st.lists(st.integers(1, 4), max_size=6), st.lists(st.integers(1, 9), max_size=6), st.randoms())
def test_every_event_is_a_place_to_come_back_to(call: Call, sizes: list[int], again: list[int], random: Any) -> None:
    async def check() -> None:
        whole = await answered(call, sizes)
        assert whole[-1] == ("r:end", "[DONE]")
        other_order = list(call.order)
        random.shuffle(other_order)  # of several choices; what the log of one says has one order
        later = replace(call, order=tuple(other_order))
        for k in range(len(whole)):
            place = sse.parse_event_id(whole[k][0])
            assert place is not None and place[0] == "r"
            had = whole[: k + 1]
            if place[1] is None:  # `end`: only [DONE] may be missing
                assert whole[k + 1 :] in ([], whole[-1:])
                continue
            rest = await answered(later, again, place[1])
            assert by_choice(had + rest) == by_choice(whole), (k, had, rest)

    asyncio.run(check())


@given(calls(), st.lists(st.integers(1, 9), max_size=6))
def test_from_the_beginning_it_is_the_same_again(call: Call, sizes: list[int]) -> None:
    async def check() -> None:
        num_choices = len(call.chunks)
        again = await answered(call, sizes, (None,) * num_choices)
        assert again == await answered(call, sizes)

    asyncio.run(check())


@given(calls(), st.lists(st.integers(1, 9), max_size=6))
def test_choices_of_a_chat_are_opened_in_their_order(call: Call, sizes: list[int]) -> None:
    """Whichever has text first: the official client's stream helper appends choices as they come."""

    async def check() -> None:
        if call.prompts[0].text.api != "chat":
            return
        chunks = [json.loads(data) for _, data in await answered(call, sizes) if data != "[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        num_choices = len(call.chunks)
        assert [c["index"] for c in choices[:num_choices]] == list(range(num_choices))
        assert ["role" in c["delta"] for c in choices] == [i < num_choices for i in range(len(choices))]

    asyncio.run(check())
