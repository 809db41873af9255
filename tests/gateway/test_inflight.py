"""A gateway's side of Redis, step by step: every reply may be lost, every stream may vanish, and no token may be."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError

from services.gateway.admission import TryLater
from services.gateway.attaching import LEAVE_WAIT_MS
from services.gateway.inflight import Inflight
from services.gateway.open_request import MAX_QUEUED_BYTES, Event, Moved, OpenRequest, RequestLost
from shared.bus import StreamReader
from shared.protocol import Outcome, TokenChunk
from shared.scripts import CommitCode
from shared.wire import pack_ids
from tests.gateway.conftest import Gateway, GatewayMaker
from tests.gateway.fake_worker import PROMPT, FakeWorker, spec
from tests.helpers import wait_until


async def submitted(gateway: Gateway, num_choices: int = 1, wake: asyncio.Event | None = None) -> OpenRequest:
    wake = wake or asyncio.Event()
    [request] = await gateway.inflight.submit([(spec(num_choices), pack_ids(PROMPT))], "owner", wake)
    return request


def ids_of(events: list[Event], choice: int = 0) -> list[int]:
    return [i for c, item in events if c == choice and isinstance(item, TokenChunk) for i in item.ids]


def outcomes_of(events: list[Event]) -> list[tuple[int, str]]:
    return [(c, item.reason) for c, item in events if isinstance(item, Outcome)]


async def read_and_take(inflight: Inflight, request: OpenRequest) -> list[Event]:
    await inflight.read(0)
    return await inflight.take(request)


async def state_of(gateway: Gateway, sid: str) -> tuple[str, str]:
    record = await gateway.records.sequence(sid)
    assert record is not None
    return record.state, record.gateway


async def test_tokens_come_back_in_order_and_the_outcome_last(gateway: Gateway, worker: FakeWorker) -> None:
    wake = asyncio.Event()
    request = await submitted(gateway, 2, wake)
    first, second = request.open_sids
    await worker.place(first)
    await worker.place(second)
    await worker.commit_all({first: ([7], ""), second: ([8, 9], "stop")})
    await worker.commit(first, [10], "length")
    assert not wake.is_set()
    await gateway.inflight.read(0)
    assert wake.is_set()
    events = await gateway.inflight.take(request)
    assert (ids_of(events, 0), ids_of(events, 1)) == ([7, 10], [8, 9])
    assert outcomes_of(events) == [(1, "stop"), (0, "length")]
    gateway.inflight.close(request)
    await gateway.inflight.settle()
    assert "cancel_if" not in gateway.scripts.calls
    assert gateway.inflight.requests == []


async def test_a_lost_admission_reply_is_repeated_and_admits_once(gateway: Gateway, worker: FakeWorker) -> None:
    gateway.scripts.lose = ["admit", "admit"]
    request = await submitted(gateway)
    assert gateway.scripts.calls.count("admit") == 3
    assert await worker.queued() == request.open_sids


@pytest.mark.parametrize(("limits", "what"), [({"max_requests": 1}, "requests"), ({"max_tokens": 5}, "tokens")])
async def test_a_full_queue_says_when_to_come_back(
    new_gateway: GatewayMaker, limits: dict[str, int], what: str
) -> None:
    gateway = await new_gateway(**limits)
    await submitted(gateway)
    with pytest.raises(TryLater) as refused:
        await submitted(gateway)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    assert what in refused.value.message
    assert len(gateway.inflight.requests) == 1


async def test_the_wait_advised_grows_with_a_slow_drain(new_gateway: GatewayMaker, worker: FakeWorker) -> None:
    now = 100.0
    gateway = await new_gateway(max_requests=6, clock=lambda: now)
    another = await new_gateway()  # the drain is the queue's, not that of one gateway's requests
    for _ in range(2):
        request = await submitted(another)
        await submitted(gateway)
        await worker.place(request.open_sids[0])
        now += 4  # two sequences in eight seconds
    for _ in range(4):
        await submitted(gateway)
    with pytest.raises(TryLater) as refused:
        await submitted(gateway)
    assert refused.value.retry_after_s == 12  # for three of six


async def test_a_full_server_refuses_new_requests_and_ends_old_ones(any_redis_url: str) -> None:
    gateway = Gateway(any_redis_url)
    await gateway.inflight.refresh()
    request = await submitted(gateway)
    await gateway.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(TryLater) as refused:
            await submitted(gateway)
        gateway.inflight.close(request)
        await gateway.inflight.settle()
    finally:
        await gateway.redis.config_set("maxmemory", 0)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
    assert gateway.inflight.requests == []
    assert await state_of(gateway, f"{request.rid}.0") == ("done", gateway.inflight.incarnation)
    await gateway.redis.aclose()


async def test_a_server_that_fills_up_between_two_tries_may_have_taken_the_first(gateway: Gateway) -> None:
    gateway.scripts.lose = ["admit"]
    gateway.scripts.refuse = ["admit"]
    with pytest.raises(TryLater) as refused:
        await submitted(gateway)
    assert refused.value.status == 503
    [key] = await gateway.redis.keys(gateway.scripts.key("s:*"))
    assert await gateway.redis.hget(key, "state") == b"queued"
    await gateway.inflight.settle()
    assert await gateway.redis.hget(key, "state") == b"done"


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_ends_the_work_in_every_phase(
    gateway: Gateway, worker: FakeWorker, phase: str
) -> None:
    request = await submitted(gateway, 2)
    if phase != "queued":
        for sid in request.open_sids:
            await worker.place(sid)
    if phase == "decode":
        await worker.commit(request.open_sids[0], [5])
        await gateway.inflight.read(0)
    sids = request.open_sids
    gateway.inflight.close(request)
    await gateway.inflight.settle()
    assert [(await state_of(gateway, sid))[0] for sid in sids] == ["done", "done"]
    assert await worker.queued() == []
    if phase != "queued":
        assert (await worker.commit(sids[1], [6]))[0] is CommitCode.DONE


async def test_a_cancel_is_repeated_until_redis_has_answered(gateway: Gateway) -> None:
    first, second = await submitted(gateway), await submitted(gateway)
    gateway.scripts.lose = ["cancel_if"]
    gateway.inflight.close(first)
    gateway.inflight.close(second)
    with pytest.raises(ConnectionError):
        await gateway.inflight.settle()
    await asyncio.wait_for(gateway.inflight.settle_next(), 5)
    for request in (first, second):
        assert (await state_of(gateway, f"{request.rid}.0"))[0] == "done"


async def test_a_choice_that_waited_too_long_ends_unless_it_has_ever_been_placed(
    gateway: Gateway, worker: FakeWorker
) -> None:
    request = await submitted(gateway, 3)
    waiting, placed, back = request.open_sids
    for sid in (placed, back):
        await worker.place(sid)
    await worker.scripts.requeue(back, 1)
    for choice in range(3):
        gateway.inflight.end_if_never_placed(request, choice, Outcome(reason="error", code="queue_timeout"))
    await gateway.inflight.settle()
    assert [(await state_of(gateway, sid))[0] for sid in (waiting, placed, back)] == ["done", "placed", "queued"]
    assert outcomes_of(await read_and_take(gateway.inflight, request)) == [(0, "error")]
    assert request.open_choices == {1, 2}


async def test_only_the_choices_that_still_run_are_cancelled(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway, 2)
    first, second = request.open_sids
    await worker.place(first)
    await worker.commit(first, [5], "stop")
    await read_and_take(gateway.inflight, request)
    assert request.open_sids == [second]
    gateway.inflight.close(request)
    await gateway.inflight.settle()
    ended = await gateway.records.sequence(first)
    assert ended is not None and b"stop" in ended.outcome


async def test_a_stop_string_found_here_ends_the_sequence_with_its_count(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    await worker.place(sid)
    await worker.commit(sid, [5, 6, 7])
    await read_and_take(gateway.inflight, request)
    gateway.scripts.lose = ["finish"]
    gateway.inflight.finish(request, 0, Outcome(reason="stop", num_tokens=2))
    gateway.inflight.close(request)
    with pytest.raises(ConnectionError):
        await gateway.inflight.settle()
    await gateway.inflight.settle()
    record = await gateway.records.sequence(sid)
    assert record is not None and record.state == "done"
    assert b"stop" in record.outcome
    assert (await worker.commit(sid, [8]))[0] is CommitCode.DONE


@pytest.mark.parametrize("loss", ["stream", "lease", "both"])
async def test_a_lost_stream_or_lease_loses_no_token(gateway: Gateway, worker: FakeWorker, loss: str) -> None:
    request = await submitted(gateway, 2)
    first, second = request.open_sids
    old = gateway.inflight.incarnation
    await worker.place(first)
    await worker.place(second)
    await worker.commit_all({first: ([1, 2], ""), second: ([3], "")})
    seen = await read_and_take(gateway.inflight, request)
    if loss != "lease":
        await gateway.redis.delete(gateway.scripts.key(f"out:{old}"))
    if loss != "stream":
        await gateway.redis.delete(gateway.scripts.key(f"lease:gateway:{old}"))
    await worker.commit_all({first: ([4], "length"), second: ([5], "")})
    await gateway.inflight.refresh()
    assert gateway.inflight.incarnation != old
    seen += await gateway.inflight.take(request)
    await worker.commit(second, [6], "stop")
    seen += await read_and_take(gateway.inflight, request)
    assert (ids_of(seen, 0), ids_of(seen, 1)) == ([1, 2, 4], [3, 5, 6])
    assert outcomes_of(seen) == [(0, "length"), (1, "stop")]
    await gateway.inflight.settle()
    assert old not in await gateway.records.members()


async def test_a_stream_that_went_back_in_time_is_noticed(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    await worker.place(sid)
    await worker.commit(sid, [1])
    await gateway.inflight.read(0)
    key = gateway.scripts.key(f"out:{gateway.inflight.incarnation}")
    await gateway.redis.delete(key)
    await gateway.redis.xadd(key, {"born": "again"}, id="1-1")
    old = gateway.inflight.incarnation
    await gateway.inflight.refresh()
    assert gateway.inflight.incarnation != old


async def test_a_cancel_decided_before_a_reattach_does_nothing(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    seen_by_scheduler = await gateway.records.sequence(sid)
    assert seen_by_scheduler is not None
    await gateway.redis.delete(gateway.scripts.key(f"lease:gateway:{gateway.inflight.incarnation}"))
    await gateway.inflight.refresh()
    assert await worker.scripts.cancel_if([sid], seen_by_scheduler.attach, Outcome(reason="cancelled")) == 0
    assert await state_of(gateway, sid) == ("queued", gateway.inflight.incarnation)


async def lapse(gateway: Gateway, lose: str = "") -> None:
    """The lease ends and is noticed; the reply of the named script is lost on the way."""
    await gateway.redis.delete(gateway.scripts.key(f"lease:gateway:{gateway.inflight.incarnation}"))
    gateway.scripts.lose = [lose] if lose else []
    if lose:
        with pytest.raises(ConnectionError):
            await gateway.inflight.refresh()
    else:
        await gateway.inflight.refresh()


@pytest.mark.parametrize("script", ["refresh", "join", "attach"])
async def test_a_lost_reply_on_the_way_back_is_repeated(gateway: Gateway, worker: FakeWorker, script: str) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    await worker.place(sid)
    await lapse(gateway, lose=script)
    await gateway.inflight.refresh()
    await worker.commit(sid, [1, 2], "stop")
    seen = await read_and_take(gateway.inflight, request)
    assert ids_of(seen) == [1, 2] or ids_of(seen + await gateway.inflight.take(request)) == [1, 2]
    assert await state_of(gateway, sid) == ("done", gateway.inflight.incarnation)


async def test_a_reattach_with_a_lost_reply_is_not_taken_for_another_gateways(gateway: Gateway) -> None:
    request = await submitted(gateway)
    await lapse(gateway, lose="attach")
    await lapse(gateway)  # a second life before the first answer was known
    assert request.ended is None
    assert await state_of(gateway, f"{request.rid}.0") == ("queued", gateway.inflight.incarnation)


async def test_a_client_that_leaves_while_a_reattach_is_uncertain_is_cancelled(gateway: Gateway) -> None:
    request = await submitted(gateway)
    await lapse(gateway, lose="attach")
    gateway.inflight.close(request)
    await gateway.inflight.settle()
    assert (await state_of(gateway, f"{request.rid}.0"))[0] == "done"


async def test_a_request_admitted_while_a_new_life_began_is_attached(gateway: Gateway, worker: FakeWorker) -> None:
    gateway.scripts.pause["admit"] = asyncio.Event()
    submitting = asyncio.ensure_future(submitted(gateway))
    await asyncio.sleep(0)
    await lapse(gateway)
    gateway.scripts.pause["admit"].set()
    request = await submitting
    await gateway.inflight.refresh()
    assert await state_of(gateway, f"{request.rid}.0") == ("queued", gateway.inflight.incarnation)


async def test_a_client_that_leaves_during_a_reattach_is_attached_no_further(gateway: Gateway) -> None:
    request = await submitted(gateway)
    await lapse(gateway, lose="attach")
    await gateway.redis.delete(gateway.scripts.key(f"lease:gateway:{gateway.inflight.incarnation}"))
    gateway.scripts.pause["attach"] = asyncio.Event()
    refreshing = asyncio.ensure_future(gateway.inflight.refresh())
    await wait_until(lambda: gateway.scripts.calls.count("attach") == 2)
    gateway.inflight.close(request)
    gateway.scripts.pause.pop("attach").set()
    await refreshing
    assert gateway.scripts.calls.count("attach") == 2
    await gateway.inflight.settle()
    assert (await state_of(gateway, f"{request.rid}.0"))[0] == "done"


async def test_tokens_written_before_the_stream_is_read_are_in_the_log(gateway: Gateway, worker: FakeWorker) -> None:
    await lapse(gateway, lose="join")
    request = await submitted(gateway)
    [sid] = request.open_sids
    await worker.place(sid)
    await worker.commit(sid, [1])
    await gateway.inflight.refresh()
    assert ids_of(await gateway.inflight.take(request)) == [1]


async def test_after_a_lost_connection_the_stream_is_looked_after_at_once(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> None:
        raise ConnectionError("away")

    old = gateway.inflight.incarnation
    with monkeypatch.context() as patch:
        patch.setattr(StreamReader, "read", lost)
        with pytest.raises(ConnectionError):
            await gateway.inflight.turn()
    await gateway.redis.flushall()
    await asyncio.wait_for(gateway.inflight.turn(), 1)
    assert gateway.inflight.incarnation != old


async def test_a_client_that_attached_elsewhere_ends_the_response_here(
    gateway: Gateway, new_gateway: GatewayMaker
) -> None:
    request = await submitted(gateway)
    other = await new_gateway()
    await other.scripts.attach(request.rid, other.inflight.incarnation)
    with pytest.raises(Moved):
        await read_and_take(gateway.inflight, request)
    gateway.inflight.close(request)
    await gateway.inflight.settle()
    assert await state_of(gateway, f"{request.rid}.0") == ("queued", other.inflight.incarnation)


async def test_a_gateway_that_comes_back_too_late_does_not_take_the_client_away(
    gateway: Gateway, new_gateway: GatewayMaker
) -> None:
    request = await submitted(gateway)
    other = await new_gateway()
    await gateway.redis.delete(gateway.scripts.key(f"out:{gateway.inflight.incarnation}"))
    await other.scripts.attach(request.rid, other.inflight.incarnation)
    await lapse(gateway)
    with pytest.raises(Moved):
        await gateway.inflight.take(request)


async def test_a_request_that_redis_has_forgotten_ends(gateway: Gateway) -> None:
    request = await submitted(gateway)
    await gateway.redis.flushall()
    await gateway.inflight.refresh()
    with pytest.raises(RequestLost):
        await gateway.inflight.take(request)


async def test_tokens_that_nobody_waits_for_are_cancelled(gateway: Gateway, worker: FakeWorker) -> None:
    orphan = spec()
    await worker.scripts.admit(
        [(orphan, pack_ids(PROMPT))], gateway=gateway.inflight.incarnation, owner="", priority=0, max_requests=9,
        max_tokens=99, retention_ms=9999,
    )  # fmt: skip
    await worker.place(f"{orphan.rid}.0")
    await worker.commit(f"{orphan.rid}.0", [1])
    await gateway.inflight.read(0)
    await gateway.inflight.settle()
    assert (await state_of(gateway, f"{orphan.rid}.0"))[0] == "done"


async def test_what_a_newer_service_writes_is_passed_over(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    key = gateway.inflight._scripts.key(f"out:{gateway.inflight.incarnation}")
    await gateway.redis.xadd(key, {"m": "x", "~": "x", f"~{sid}": "x", ".": "x", "a.b": "x", "\u00e9.0": "x"})
    await worker.place(sid)
    await worker.commit(sid, [7], "length")
    assert ids_of(await read_and_take(gateway.inflight, request)) == [7]
    await gateway.inflight.settle()


async def test_late_tokens_of_an_ended_request_cost_no_call(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    await worker.place(sid)
    await worker.commit(sid, [1])
    gateway.inflight.close(request)
    await gateway.inflight.settle()
    num_calls = (await gateway.redis.info("stats"))["total_commands_processed"]
    await gateway.inflight.read(0)
    await gateway.inflight.settle()
    assert (await gateway.redis.info("stats"))["total_commands_processed"] == num_calls + 2  # XREAD and INFO


async def test_a_client_that_leaves_while_being_admitted_leaves_nothing(gateway: Gateway, worker: FakeWorker) -> None:
    gateway.scripts.pause["admit"] = asyncio.Event()
    submitting = asyncio.ensure_future(submitted(gateway))
    await asyncio.sleep(0)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert len(gateway.inflight.requests) == 1
    gateway.scripts.pause["admit"].set()
    await asyncio.wait_for(gateway.inflight.settle_next(), 5)
    assert gateway.inflight.requests == []
    assert "cancel_if" in gateway.scripts.calls
    assert await worker.queued() == []


async def test_a_client_that_leaves_just_when_it_is_admitted_leaves_nothing(
    gateway: Gateway, worker: FakeWorker
) -> None:
    submitting = asyncio.ensure_future(submitted(gateway))
    await wait_until(lambda: any(request.admitted for request in gateway.inflight.requests), every=0)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    await asyncio.wait_for(gateway.inflight.settle_next(), 5)
    assert await worker.queued() == []


async def test_a_slow_client_is_served_from_the_log_with_bounded_memory(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    await worker.place(sid)
    num_ids = MAX_QUEUED_BYTES // 16
    for i in range(6):
        await worker.commit(sid, [i] * num_ids)
        await gateway.inflight.read(0)
        assert request.num_bytes <= MAX_QUEUED_BYTES
    assert request.behind
    seen = await gateway.inflight.take(request)
    await worker.commit(sid, [6] * num_ids, "stop")
    seen += await read_and_take(gateway.inflight, request)
    assert ids_of(seen) == [i for i in range(7) for _ in range(num_ids)]
    assert outcomes_of(seen) == [(0, "stop")]


async def test_while_redis_is_away_the_log_is_asked_again_later(
    gateway: Gateway, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = asyncio.Event()
    request = await submitted(gateway, wake=wake)
    [sid] = request.open_sids
    await worker.place(sid)
    await worker.commit(sid, [1])
    request.fall_behind()
    wake.clear()

    async def lost(sid: str) -> None:
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.records, "sequence", lost)
        assert await gateway.inflight.take(request) == []
    assert not wake.is_set()  # at once would be in a loop without rest
    await asyncio.wait_for(wake.wait(), 5)
    assert ids_of(await gateway.inflight.take(request)) == [1]


async def test_leaving_leaves_what_is_open_to_others_and_says_goodbye(gateway: Gateway) -> None:
    request = await submitted(gateway)
    await gateway.inflight.leave()
    sid = f"{request.rid}.0"
    assert await state_of(gateway, sid) == ("queued", "")
    readers, now_ms = await gateway.records.readers([sid])
    assert LEAVE_WAIT_MS - 2000 < readers[sid].orphan_at_ms - now_ms <= LEAVE_WAIT_MS
    assert gateway.inflight.incarnation not in await gateway.records.members()


async def test_the_stream_is_trimmed_up_to_what_was_handled(gateway: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    [sid] = request.open_sids
    await worker.place(sid)
    for i in range(5):
        await worker.commit(sid, [i])
    key = gateway.scripts.key(f"out:{gateway.inflight.incarnation}")
    await gateway.inflight.read(0)
    await gateway.inflight.refresh()
    assert await gateway.redis.xlen(key) == 1  # the last one handled stays, so that its id shows which stream it is


async def test_a_join_that_comes_late_is_no_token(gateway: Gateway, worker: FakeWorker) -> None:
    """The connection broke under it, so it was repeated; then the first one arrives all the same."""
    request = await submitted(gateway)
    await worker.place(request.open_sids[0])
    await gateway.scripts.join(gateway.inflight._membership.member, 1000, [f"out:{gateway.inflight.incarnation}"])
    await worker.commit(request.open_sids[0], [7])
    assert ids_of(await read_and_take(gateway.inflight, request)) == [7]
