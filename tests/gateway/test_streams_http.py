"""An answer is taken up where its client left it, at any gateway, by its owner; and a repeated call joins it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest
from openai.types import Completion

from shared.protocol import Outcome
from shared.records import RequestRecord, SequenceRecord
from tests.gateway.conftest import Served
from tests.gateway.raw_client import RawClient
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]
Json = dict[str, Any]
BODY: Json = {"prompt": "x", "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
COMPLETION: Json = {"prompt": "x", "max_tokens": 60}
TEXT = "naïve — 日本語 🙂 stop here"
ALICE, BOB = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))


@pytest.fixture
async def other(serve_with: Serve) -> Served:
    return await serve_with()


def reply(request: RequestRecord, choice: int) -> list[int]:
    return list(f"{choice}: {TEXT}".encode())


def events_of(text: str) -> list[tuple[str, str]]:
    """(id, data) of the events."""
    events, id = [], ""
    for line in text.splitlines():
        if line.startswith("id: "):
            id = line[4:]
        elif line.startswith("data: "):
            events.append((id, line[6:]))
            id = ""
    return events


async def whole(served: Served, body: Json, path: str = "/v1/completions", **options: Any) -> list[tuple[str, str]]:
    async with served.session.post(served.url + path, json=body, **options) as response:
        assert response.status == 200, await response.text()
        return events_of(await response.text())


async def taken_up(
    served: Served, rid: str, after: str = "", headers: Json | None = None, query: str = ""
) -> tuple[int, str]:
    given = (headers or {}) | ({"Last-Event-ID": after} if after else {})
    async with served.session.get(f"{served.url}/v1/streams/{rid}{query}", headers=given) as response:
        return response.status, await response.text()


def code_of(answer: tuple[int, str]) -> tuple[int, Any]:
    return answer[0], json.loads(answer[1])["error"]["code"]


def rid_of(event_id: str) -> str:
    return event_id.partition(":")[0]


async def record_of(served: Served, sid: str) -> SequenceRecord:
    record = await served.worker.records.sequence(sid)
    assert record is not None
    return record


async def begin(served: Served, body: Json, headers: Json | None = None) -> tuple[aiohttp.ClientResponse, str, str]:
    """A stream that has brought its first event: the response, that event's id, and the sequence."""
    asking = asyncio.ensure_future(served.session.post(served.url + "/v1/completions", json=body, headers=headers))
    [sid] = await wait_until(served.worker.queued)
    await served.worker.place(sid)
    await served.worker.commit(sid, list(b"one "))
    response = await asking
    line = await response.content.readuntil(b"\n\n")
    return response, events_of(line.decode())[0][0], sid


# --- where it goes on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/completions", BODY | {"n": 2, "stop": ["stop h"], "echo": True}),
        ("/v1/completions", BODY | {"prompt": ["x", "yz"], "n": 2}),
        ("/v1/chat/completions", {k: v for k, v in BODY.items() if k != "prompt"} | {"n": 2}),
    ],
    ids=["plain", "choices, stops and an echo", "prompts", "chat"],
)
async def test_a_finished_stream_goes_on_after_any_event_at_another_gateway(
    served: Served, other: Served, answering: Callable[..., None], path: str, body: Json
) -> None:
    answering(reply)
    if "chat" in path:
        body = body | {"messages": [{"role": "user", "content": "hi"}]}
    events = await whole(served, body, path)
    rid = rid_of(events[0][0])
    for k in range(0, len(events) - 1, 7):
        status, text = await taken_up(other, rid, events[k][0])
        assert status == 200, text
        rest = events_of(text)
        assert by_choice(events[: k + 1] + rest) == by_choice(events)
        if not body.get("n"):
            assert rest == events[k + 1 :]  # also the ids: there is but one order
    assert events_of((await taken_up(other, rid, events[-1][0]))[1]) == events[-1:]
    assert by_choice(events_of((await taken_up(other, rid))[1])) == by_choice(events)


def by_choice(events: list[tuple[str, str]]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for _, data in events:
        choices = json.loads(data)["choices"] if data != "[DONE]" else []
        found.setdefault(choices[0]["index"] if choices else None, []).append(data)
    return found


async def test_a_live_stream_goes_on_at_another_gateway_and_ends_at_the_first(served: Served, other: Served) -> None:
    first, place, sid = await begin(served, BODY)
    taking_up = asyncio.ensure_future(taken_up(other, rid_of(place), place))
    left = events_of((await first.read()).decode())
    assert json.loads(left[-1][1])["error"]["code"] == "stream_moved"
    await served.worker.commit(sid, list(b"two"), "length")
    status, text = await taking_up
    assert status == 200
    assert [json.loads(d)["choices"][0]["text"] for _, d in events_of(text)[:-2]] == ["two"]
    assert json.loads(events_of(text)[-2][1])["usage"]["completion_tokens"] == 7
    assert served.service.inflight.requests == other.service.inflight.requests == []


async def test_a_client_that_comes_back_to_its_gateway_before_it_is_missed(served: Served) -> None:
    first, place, sid = await begin(served, BODY)
    taking_up = asyncio.ensure_future(taken_up(served, rid_of(place), place))
    assert json.loads(events_of((await first.read()).decode())[-1][1])["error"]["code"] == "stream_moved"
    await wait_until(lambda: record_is(served, sid, "placed", attach=2))
    await served.worker.commit(sid, list(b"two"), "length")
    status, text = await taking_up
    assert [json.loads(d)["choices"][0]["text"] for _, d in events_of(text)[:-2]] == ["two"]
    assert events_of(text)[-1][1] == "[DONE]"


async def record_is(served: Served, sid: str, state: str, **fields: Any) -> bool:
    record = await record_of(served, sid)
    return record.state == state and all(getattr(record, name) == value for name, value in fields.items())


async def test_a_long_log_is_read_in_pages(
    served: Served, answering: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.open_request.PAGE_CHUNKS", 3)
    answering(reply)
    events = await whole(served, BODY)
    assert events_of((await taken_up(served, rid_of(events[0][0])))[1]) == events


async def test_the_place_may_stand_in_the_address_and_the_header_counts(
    served: Served, answering: Callable[..., None]
) -> None:
    answering(reply)
    events = await whole(served, BODY)
    rid, early, late = rid_of(events[0][0]), events[0][0], events[9][0]
    assert events_of((await taken_up(served, rid, query=f"?after={late}"))[1]) == events[10:]
    assert events_of((await taken_up(served, rid, after=late, query=f"?after={early}"))[1]) == events[10:]


async def test_a_whole_answer_is_fetched_as_it_was_asked_for(served: Served, answering: Callable[..., None]) -> None:
    answering(reply)
    body = {"prompt": "x", "max_tokens": 60, "n": 2}
    async with served.session.post(served.url + "/v1/completions", json=body) as response:
        first = await response.text()
    rid = json.loads(first)["id"].removeprefix("cmpl-")
    assert await taken_up(served, rid) == (200, first)
    assert code_of(await taken_up(served, rid, after=f"{rid}:0,0")) == (400, 400)


# --- who may, and what is not there ----------------------------------------------------------------------------------


async def test_another_keys_stream_is_as_unknown_as_none(serve_with: Serve, answering: Callable[..., None]) -> None:
    served = await serve_with(api_keys=("alice", "bob"))
    answering(reply)
    events = await whole(served, BODY, headers=ALICE)
    rid = rid_of(events[0][0])
    assert (await taken_up(served, rid, headers=ALICE))[0] == 200
    of_another = await taken_up(served, rid, headers=BOB)
    assert of_another == await taken_up(served, "0" * 40, headers=BOB)
    assert of_another == await taken_up(served, "nonsense", headers=BOB)
    assert code_of(of_another) == (404, "stream_not_found")
    assert (await taken_up(served, rid))[0] == 401
    async with served.session.delete(f"{served.url}/v1/streams/{rid}", headers=BOB) as response:
        assert response.status == 404


async def test_what_is_kept_no_longer_is_gone(served: Served, answering: Callable[..., None]) -> None:
    answering(reply)
    events = await whole(served, BODY)
    rid = rid_of(events[0][0])
    keys = [key async for key in served.worker.redis.scan_iter(f"*{rid}*")]
    assert all([await served.worker.redis.pttl(key) > 0 for key in keys])
    await served.worker.redis.delete(*keys)
    assert code_of(await taken_up(served, rid, events[3][0])) == (410, "stream_expired")


@pytest.mark.parametrize(
    "place", ["x", "{rid}:", "{rid}:0,0", "{rid}:9999", "{rid}:200e", "0123:5", "{rid}:5;", "{rid}:-1"]
)
async def test_a_place_that_the_stream_does_not_have_is_refused(
    served: Served, answering: Callable[..., None], place: str
) -> None:
    answering(reply)
    events = await whole(served, BODY)
    rid = rid_of(events[0][0])
    status, text = await taken_up(served, rid, place.format(rid=rid))
    assert (status, json.loads(text)["error"]["param"]) == (400, "Last-Event-ID"), text


async def test_while_redis_is_away_it_is_said_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(rid: str) -> None:
        raise ConnectionError("away")

    first, place, sid = await begin(served, BODY)
    monkeypatch.setattr(served.service.inflight._records, "request", lost)
    assert code_of(await taken_up(served, rid_of(place), place)) == (503, "queue_unreachable")
    await served.worker.commit(sid, list(b"two"), "length")
    assert b"[DONE]" in await first.read()


# --- how long it goes on without a client ----------------------------------------------------------------------------


async def leave(served: Served, headers: str, streamed: bool = True) -> str:
    """A client that has begun to read and leaves; the sequence."""
    client = await RawClient.connect(served)
    client.post("/v1/completions", {"prompt": "x", "max_tokens": 60, "stream": streamed}, headers)
    [sid] = await wait_until(served.worker.queued)
    await served.worker.place(sid)
    await served.worker.commit(sid, list(b"one "))
    if streamed:
        await client.reader.readuntil(b"data: ")
    client.close()
    return sid


@pytest.mark.parametrize("streamed", [True, False])
async def test_without_a_resume_time_nothing_goes_on(served: Served, streamed: bool) -> None:
    sid = await leave(served, "", streamed)
    await wait_until(lambda: record_is(served, sid, "done"))
    status, text = await taken_up(served, sid.partition(".")[0])
    if streamed:  # what was committed, and that it was cancelled
        assert [json.loads(data).get("error", {}).get("code") for _, data in events_of(text)] == [None, "cancelled"]
    else:
        assert code_of((status, text)) == (410, "cancelled")


@pytest.mark.parametrize("streamed", [True, False])
async def test_with_a_resume_time_it_goes_on_and_can_be_taken_up(served: Served, other: Served, streamed: bool) -> None:
    sid = await leave(served, "X-Headrace-Resume: 60.5\r\n", streamed)
    await wait_until(lambda: record_is(served, sid, "placed", gateway=""))
    readers, now_ms = await served.worker.records.readers([sid])
    assert 58_000 < readers[sid].orphan_at_ms - now_ms <= 60_500
    assert served.service.inflight.requests == []
    await served.worker.commit(sid, list(b"two "))
    rid = sid.partition(".")[0]
    taking_up = asyncio.ensure_future(taken_up(other, rid))
    await wait_until(lambda: record_is(served, sid, "placed", gateway=other.service.inflight.incarnation))
    await served.worker.commit(sid, list(b"three"), "length")
    status, text = await taking_up
    assert status == 200
    if streamed:
        text = "".join(json.loads(data)["choices"][0]["text"] for _, data in events_of(text)[:-1])
    else:
        text = json.loads(text)["choices"][0]["text"]
    assert text == "one two three"


async def test_the_server_may_have_a_resume_time_of_its_own(serve_with: Serve) -> None:
    served = await serve_with(resume_s=30)
    sid = await leave(served, "")
    await wait_until(lambda: record_is(served, sid, "placed", gateway=""))
    await served.worker.fail(sid, "internal_error", "the end")
    sid = await leave(served, "X-Headrace-Resume: 0\r\n")
    await wait_until(lambda: record_is(served, sid, "done"))


@pytest.mark.parametrize("value", ["", "x", "-1", "1e3", "inf", "601", "9" * 20])
async def test_a_resume_time_out_of_bounds_is_refused(served: Served, value: str) -> None:
    status, answer, _ = await served.post("/v1/completions", BODY, headers={"X-Headrace-Resume": value})
    assert (status, answer["error"]["param"]) == (400, "X-Headrace-Resume")
    assert await served.worker.queued() == []


async def test_a_request_is_ended_from_anywhere(served: Served, other: Served) -> None:
    first, place, sid = await begin(served, BODY, {"X-Headrace-Resume": "60"})
    async with other.session.delete(f"{other.url}/v1/streams/{rid_of(place)}") as response:
        assert (response.status, (await response.json())["cancelled"]) == (200, True)
    assert await record_is(served, sid, "done")
    assert json.loads(events_of((await first.read()).decode())[-1][1])["error"]["code"] == "cancelled"


# --- calls that are repeated -----------------------------------------------------------------------------------------

KEY = {"Idempotency-Key": "order 66"}


async def num_made(served: Served) -> int:
    return len([key async for key in served.worker.redis.scan_iter("*:r:*")])


@pytest.mark.parametrize("streamed", [(True, True), (False, False), (True, False), (False, True)])
async def test_a_call_made_twice_at_once_has_one_answer(
    served: Served, other: Served, streamed: tuple[bool, bool]
) -> None:
    async def ask(at: Served, stream: bool) -> str:
        body = {"prompt": "x", "max_tokens": 60, "n": 2, "stream": stream}
        async with at.session.post(at.url + "/v1/completions", json=body, headers=KEY) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    asking = [asyncio.ensure_future(ask(at, stream)) for at, stream in zip((served, other), streamed, strict=True)]
    sids = await wait_until(served.worker.queued)
    for sid in sids:
        await served.worker.place(sid)
        await served.worker.commit(sid, list(b"one "))
    await wait_until(lambda: record_is(served, sids[0], "placed", attach=2))  # the second has become the reader
    for sid in sids:
        await served.worker.commit(sid, list(b"two"), "length")
    answers = await asyncio.gather(*asking)
    assert await num_made(served) == 1
    texts = [_texts(answer) for answer in answers]
    assert texts == [["one two", "one two"]] * 2
    if streamed[0] == streamed[1]:
        assert by_choice(events_of(answers[0])) == by_choice(events_of(answers[1]))
        assert streamed[0] or answers[0] == answers[1]
    assert served.service.inflight.requests == other.service.inflight.requests == []


def _texts(answer: str) -> list[str]:
    if answer.startswith("{"):
        return [choice["text"] for choice in json.loads(answer)["choices"]]
    texts = ["", ""]
    for _, data in events_of(answer)[:-1]:
        for choice in json.loads(data)["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def test_many_equal_calls_at_one_gateway_are_one(served: Served, answering: Callable[..., None]) -> None:
    asking = [asyncio.ensure_future(whole(served, BODY, headers=KEY)) for _ in range(6)]
    await wait_until(served.worker.queued)
    answering(reply)
    answers = await asyncio.gather(*asking)
    assert len({str(answer) for answer in answers}) == 1 and answers[0][-1][1] == "[DONE]"
    assert await num_made(served) == 1 and served.service.inflight.requests == []


async def test_a_call_that_is_repeated_later_has_the_same_answer(
    served: Served, other: Served, answering: Callable[..., None]
) -> None:
    answering(reply)
    events = await whole(served, BODY, headers=KEY)
    assert await whole(served, BODY, headers=KEY) == await whole(other, BODY, headers=KEY) == events
    place = {"Last-Event-ID": events[5][0]}
    assert await whole(other, BODY, headers=KEY | place) == events[6:]
    assert await num_made(served) == 1
    without = {k: v for k, v in BODY.items() if k != "stream_options"}
    assert [("usage" in data) for _, data in await whole(other, without, headers=KEY)] == [False] * (len(events) - 1)
    status, answer, _ = await other.post("/v1/completions", COMPLETION, headers=KEY)
    assert (status, answer["choices"][0]["text"]) == (200, f"0: {TEXT}")
    assert (await whole(served, BODY, headers={"Idempotency-Key": "another"}))[0][0] != events[0][0]
    assert await num_made(served) == 2


async def test_the_same_key_with_another_body_is_refused(served: Served, answering: Callable[..., None]) -> None:
    answering(reply)
    await whole(served, BODY, headers=KEY)
    reordered = dict(reversed(BODY.items()))
    await whole(served, reordered, headers=KEY)
    status, answer, _ = await served.post("/v1/completions", BODY | {"max_tokens": 59}, headers=KEY)
    assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "stream": True}
    status, answer, _ = await served.post("/v1/chat/completions", chat, headers=KEY)
    assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
    assert await num_made(served) == 1


async def test_a_key_is_its_owners(serve_with: Serve, answering: Callable[..., None]) -> None:
    served = await serve_with(api_keys=("alice", "bob"))
    answering(reply)
    one = await whole(served, BODY, headers=ALICE | KEY)
    assert rid_of((await whole(served, BODY | {"n": 2}, headers=BOB | KEY))[0][0]) != rid_of(one[0][0])


@pytest.mark.parametrize("key", ["", "x" * 256, "ümlaut", "a\tb"])
async def test_a_key_out_of_bounds_is_refused(served: Served, key: str) -> None:
    status, answer, _ = await served.post("/v1/completions", BODY, headers={"Idempotency-Key": key})
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_refused_call_may_be_repeated(serve_with: Serve, answering: Callable[..., None]) -> None:
    served = await serve_with(max_queued_requests=2)
    body = BODY | {"prompt": ["x", "y"], "n": 2}
    status, _, _ = await served.post("/v1/completions", body, headers=KEY)
    assert status == 429
    assert await served.worker.queued() == [] and await num_made(served) == 0
    answering(reply)
    status, _, _ = await served.post("/v1/completions", body | {"n": 1, "stream": False}, headers=KEY)
    assert status == 400  # stream_options without stream
    assert (await whole(served, BODY, headers=KEY))[-1][1] == "[DONE]"


async def test_a_call_that_may_be_repeated_goes_on_for_a_while_without_a_client(served: Served) -> None:
    sid = await leave(served, "Idempotency-Key: k\r\n")
    await wait_until(lambda: record_is(served, sid, "placed", gateway=""))


async def test_who_follows_takes_over_when_the_reader_has_left(served: Served, other: Served) -> None:
    """The second of two equal calls has become the reader and leaves: the first one is not cancelled with it."""
    first, _, sid = await begin(served, BODY, KEY | {"X-Headrace-Resume": "60"})
    client = await RawClient.connect(other)
    client.post("/v1/completions", BODY, "Idempotency-Key: order 66\r\n")
    await client.reader.readuntil(b"data: ")
    client.close()
    mine = served.service.inflight.incarnation
    await wait_until(lambda: record_is(served, sid, "placed", gateway=mine, attach=3))
    await served.worker.commit(sid, list(b"two"), "length")
    assert b"two" in await first.read()


async def fails(served: Served, outcome: Outcome, at: Served | None = None) -> str:
    """Its id, of a call with KEY that ends so."""
    asking = asyncio.ensure_future(whole(at or served, BODY, headers=KEY | {"Connection": "close"}))
    [sid] = await wait_until(served.worker.queued)
    await served.worker.place(sid)
    await served.worker.commit(sid, list(b"one "))
    await served.worker.scripts.finish(sid, outcome)
    assert json.loads((await asking)[-1][1])["error"]["code"] == (outcome.code or outcome.reason)
    return sid.partition(".")[0]


@pytest.mark.parametrize("code", ["engine_error", "internal_error", "queue_timeout", "gateway_gone", "client_gone"])
async def test_a_call_that_failed_by_no_fault_of_its_own_runs_anew_under_its_key(
    code: str, served: Served, other: Served, answering: Callable[..., None]
) -> None:
    outcome = Outcome(reason="cancelled" if code.endswith("gone") else "error", code=code, message="no")
    failed = [await fails(served, outcome), await fails(served, outcome, other)]  # and so may the second try
    answering(reply)
    events = await whole(served, BODY, headers=KEY)
    assert events[-1][1] == "[DONE]" and rid_of(events[0][0]) not in failed
    assert await whole(other, BODY, headers=KEY) == events
    assert await num_made(served) == 3


async def test_calls_that_try_again_at_once_have_one_answer(
    served: Served, other: Served, answering: Callable[..., None]
) -> None:
    await fails(served, Outcome(reason="error", code="internal_error", message="no"))
    asking = [asyncio.ensure_future(whole(at, BODY, headers=KEY)) for at in (served, other, served, other)]
    await wait_until(served.worker.queued)
    answering(reply)
    answers = await asyncio.gather(*asking)
    assert len({str(answer) for answer in answers}) == 1 and answers[0][-1][1] == "[DONE]"
    assert await num_made(served) == 2


@pytest.mark.parametrize("code", ["poison_request", "context_length_exceeded", "invalid_request", ""])
async def test_what_lies_in_the_request_or_was_wanted_is_told_again(code: str, served: Served) -> None:
    outcome = Outcome(reason="error" if code else "cancelled", code=code, message="no")
    await fails(served, outcome)
    assert json.loads((await whole(served, BODY, headers=KEY))[-1][1])["error"]["code"] == (code or "cancelled")
    assert await num_made(served) == 1


async def test_a_client_that_has_some_of_a_failed_answer_is_not_given_the_beginning_of_another(served: Served) -> None:
    rid = await fails(served, Outcome(reason="error", code="internal_error", message="no"))
    status, answer, _ = await served.post("/v1/completions", BODY, headers=KEY | {"Last-Event-ID": f"{rid}:4"})
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    status, answer, _ = await served.post("/v1/completions", BODY | {"max_tokens": 59}, headers=KEY)
    assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")


async def test_an_error_is_told_after_what_came_before_it(served: Served) -> None:
    first, place, sid = await begin(served, BODY)
    await served.worker.commit(sid, list(b"two"))
    await served.worker.scripts.finish(sid, Outcome(reason="error", code="poison_request", message="no"))
    await first.read()
    events = events_of((await taken_up(served, rid_of(place)))[1])
    assert [json.loads(d)["choices"][0]["text"] for _, d in events[:-1]] == ["one ", "two"]
    assert json.loads(events[-1][1])["error"]["code"] == "poison_request"
    assert code_of(await taken_up(served, rid_of(place), events[-2][0])) == (500, "poison_request")


async def test_what_fails_unforeseen_after_the_first_byte_is_one_error_event(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second answer in the midst of the first."""
    first, _, sid = await begin(served, BODY)

    def fail(*_: object) -> None:
        raise RuntimeError("a name that no client may see")

    monkeypatch.setattr("services.gateway.choice_stream.ChoiceStream.feed", fail)
    await served.worker.commit(sid, list(b"two"))
    text = (await first.read()).decode()
    assert json.loads(text.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "HTTP/1.1" not in text and "no client" not in text
    await wait_until(lambda: record_is(served, sid, "done"))


async def test_the_official_client_asks_for_all_of_a_stream_again(
    served: Served, answering: Callable[..., None]
) -> None:
    answering(reply)
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        first = [chunk async for chunk in await client.completions.create(model="", stream=True, **COMPLETION)]
        rid = first[0].id.partition("-")[2]
        stream_cls = openai.AsyncStream[Completion]
        again = await client.get(f"/streams/{rid}", cast_to=Completion, stream=True, stream_cls=stream_cls)
        assert [chunk async for chunk in again] == first
