"""Who reads a request changes hands in any order of events, and whoever is the reader in the end is told everything."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway import attaching
from services.gateway.admission import TryLater
from services.gateway.admitting import Repeated
from services.gateway.open_request import Event, Moved, OpenRequest, RequestLost
from shared.protocol import Outcome, TokenChunk
from shared.scripts import NO_REPEAT, Repeat
from shared.wire import pack_ids
from tests.gateway.conftest import Gateway, GatewayMaker
from tests.gateway.fake_worker import PROMPT, FakeWorker, spec
from tests.helpers import wait_until


async def submitted(gateway: Gateway, *, resume_ms: int = 0, repeat: Repeat = NO_REPEAT) -> OpenRequest:
    [request] = await gateway.inflight.submit(
        [(spec(), pack_ids(PROMPT))], "owner", asyncio.Event(), resume_ms=resume_ms, repeat=repeat
    )
    return request


async def attached(gateway: Gateway, request: OpenRequest, *, shared: bool = False, resume_ms: int = 0) -> OpenRequest:
    return await gateway.inflight.attach(request.rid, 1, asyncio.Event(), shared=shared, resume_ms=resume_ms)


def ids_of(events: list[Event]) -> list[int]:
    return [i for _, item in events if isinstance(item, TokenChunk) for i in item.ids]


async def taken(gateway: Gateway, request: OpenRequest) -> list[int]:
    """All that is new; the log is read where it has to be, also after a repeat on the stream."""
    ids = ids_of(await gateway.inflight.take(request))
    await gateway.inflight.read(0)
    return ids + ids_of(await gateway.inflight.take(request))


async def reader_of(gateway: Gateway, request: OpenRequest) -> tuple[str, str, int]:
    record = await gateway.records.sequence(f"{request.rid}.0")
    assert record is not None
    return record.state, record.gateway, record.attach


@pytest.fixture
async def other(new_gateway: GatewayMaker) -> Gateway:
    return await new_gateway()


async def test_whoever_attached_last_is_told_what_comes_after_what_was(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    request = await submitted(gateway)
    sid = request.open_sids[0]
    await worker.place(sid)
    await worker.commit(sid, [1, 2])
    second = await attached(other, request)
    await worker.commit(sid, [3])
    assert await taken(other, second) == [1, 2, 3]
    await worker.commit(sid, [4], "length")
    assert await taken(other, second) == [4]
    await gateway.inflight.read(0)
    with pytest.raises(Moved):
        await gateway.inflight.take(request)


async def test_a_move_that_was_told_before_it_came_back_is_old(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    request = await submitted(gateway)
    sid = request.open_sids[0]
    await worker.place(sid)
    await attached(other, request)
    back = await attached(gateway, request)  # the gateway has not yet read that it had moved
    assert back.attach == 3
    await worker.commit(sid, [1])
    assert await taken(gateway, back) == [1]
    with pytest.raises(Moved):
        await gateway.inflight.take(request)


async def test_a_move_that_is_told_before_the_answer_to_its_own_attach(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    """The newer one: it had the request for a moment only."""
    request = await submitted(other)
    gateway.scripts.late["attach"] = asyncio.Event()
    attaching = asyncio.ensure_future(attached(gateway, request))
    await wait_until(lambda: has_reader(gateway, request, 2))
    await attached(other, request)
    await gateway.inflight.read(0)
    gateway.scripts.late.pop("attach").set()
    moved = await attaching
    with pytest.raises(Moved):
        await gateway.inflight.take(moved)
    assert (await reader_of(gateway, request))[1:] == (other.inflight.incarnation, 3)


async def has_reader(gateway: Gateway, request: OpenRequest, number: int) -> bool:
    return (await reader_of(gateway, request))[2] == number


async def test_of_two_that_come_at_once_the_later_stays_and_can_be_cancelled(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    request = await submitted(other)
    gateway.scripts.late["attach"] = asyncio.Event()
    first = asyncio.ensure_future(attached(gateway, request))
    await wait_until(lambda: has_reader(gateway, request, 2))
    gateway.scripts.pause["attach"] = asyncio.Event()
    second = asyncio.ensure_future(attached(gateway, request))
    await wait_until(lambda: gateway.scripts.calls.count("attach") == 2)
    gateway.scripts.late.pop("attach").set()
    with pytest.raises(Moved):
        await first
    gateway.scripts.pause.pop("attach").set()
    stays = await second
    assert stays.attach == 3 and gateway.inflight.requests == [stays]
    gateway.inflight.close(stays)
    await gateway.inflight.settle()
    assert (await reader_of(gateway, request))[0] == "done"


async def test_of_two_that_share_an_answer_and_come_at_once_both_have_it(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    request = await submitted(other, repeat=Repeat("k", "d"))
    await worker.place(request.open_sids[0])
    gateway.scripts.late["attach"] = asyncio.Event()
    attaching = [asyncio.ensure_future(attached(gateway, request, shared=True)) for _ in range(2)]
    await wait_until(lambda: has_reader(gateway, request, 3))
    gateway.scripts.late.pop("attach").set()
    both = await asyncio.gather(*attaching)
    assert sorted(each.following for each in both) == [False, True]
    await worker.commit(request.open_sids[0], [1], "length")
    assert [await taken(gateway, each) for each in both] == [[1], [1]]


async def test_an_attach_whose_reply_was_lost_is_repeated(gateway: Gateway, other: Gateway, worker: FakeWorker) -> None:
    request = await submitted(other)
    gateway.scripts.lose = ["attach", "attach"]
    again = await attached(gateway, request)
    assert again.attach == (await reader_of(gateway, request))[2] == 4
    sid = request.open_sids[0]
    await worker.place(sid)
    await worker.commit(sid, [1])
    assert await taken(gateway, again) == [1]


async def test_an_attach_that_was_given_up_leaves_time_to_come_back(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "ATTACH_TIMEOUT_S", 0.05)
    request = await submitted(other)
    gateway.scripts.late["attach"] = asyncio.Event()
    with pytest.raises(TryLater):
        await attached(gateway, request)
    assert gateway.inflight.requests == []
    await gateway.inflight.settle()
    assert await reader_of(gateway, request) == ("queued", "", 2)


@pytest.mark.parametrize("resume_ms", [0, 60_000])
async def test_a_client_that_leaves_while_it_attaches(gateway: Gateway, other: Gateway, resume_ms: int) -> None:
    request = await submitted(other)
    gateway.scripts.late["attach"] = asyncio.Event()
    attaching = asyncio.ensure_future(attached(gateway, request, resume_ms=resume_ms))
    await wait_until(lambda: has_reader(gateway, request, 2))
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    gateway.scripts.late.pop("attach").set()
    await asyncio.wait_for(gateway.inflight.settle_next(), 5)
    state, reader, _ = await reader_of(gateway, request)
    assert (state, reader) == (("queued", "") if resume_ms else ("done", gateway.inflight.incarnation))
    assert gateway.inflight.requests == []


async def test_what_is_taken_up_again_and_again_ends(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "MAX_ATTACHMENTS", 3)
    request = await submitted(gateway)
    for at in (other, gateway):
        await attached(at, request)
    with pytest.raises(attaching.TooManyAttachments):
        await attached(other, request)
    await other.inflight.settle()
    assert (await reader_of(gateway, request))[0] == "done"


async def test_what_has_expired_is_lost(gateway: Gateway) -> None:
    request = await submitted(gateway)
    await gateway.redis.delete(gateway.scripts.key(f"r:{request.rid}"))
    with pytest.raises(RequestLost):
        await attached(gateway, request)


async def test_an_attached_request_outlives_its_gateways_incarnation(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    request = await submitted(other)
    sid = request.open_sids[0]
    await worker.place(sid)
    again = await attached(gateway, request)
    await gateway.redis.delete(gateway.scripts.key(f"lease:gateway:{gateway.inflight.incarnation}"))
    await worker.commit(sid, [1])
    await gateway.inflight.refresh()
    assert again.attach == 3
    assert await taken(gateway, again) == [1]


async def test_who_shares_an_answer_goes_on_when_another_becomes_its_reader(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    request = await submitted(gateway, repeat=Repeat("k", "d"))
    sid = request.open_sids[0]
    await worker.place(sid)
    await worker.commit(sid, [1])
    reader = await attached(other, request, shared=True)
    await gateway.inflight.read(0)
    assert request.following and gateway.inflight.requests == []
    ids = ids_of(await gateway.inflight.take(request))
    await worker.commit(sid, [2])
    request.wake.clear()
    await asyncio.wait_for(request.wake.wait(), 5)  # it looks again by itself
    ids += ids_of(await gateway.inflight.take(request))
    assert ids == [1, 2] == await taken(other, reader)
    gateway.inflight.client_left(request)  # ends nothing
    gateway.inflight.close(request)
    await gateway.inflight.settle()
    assert await reader_of(gateway, request) == ("placed", other.inflight.incarnation, 2)


async def test_who_shares_an_answer_takes_over_where_the_reader_s_gateway_has_died(
    gateway: Gateway, other: Gateway, worker: FakeWorker
) -> None:
    """Else a scheduler would cancel it once the dead gateway's clients have had their time to come back."""
    request = await submitted(gateway, repeat=Repeat("k", "d"))
    sid = request.open_sids[0]
    await worker.place(sid)
    await attached(other, request, shared=True)
    await gateway.inflight.read(0)
    await gateway.redis.delete(gateway.scripts.key(f"lease:gateway:{other.inflight.incarnation}"))
    await taken(gateway, request)
    assert not request.following and gateway.inflight.requests == [request]
    assert await reader_of(gateway, request) == ("placed", gateway.inflight.incarnation, 3)


@pytest.mark.parametrize("leaves", ["as a follower", "while it attaches", "before it is displaced"])
async def test_a_follower_that_has_left_is_not_waited_for(gateway: Gateway, other: Gateway, leaves: str) -> None:
    request = await submitted(other, repeat=Repeat("k", "d"))
    if leaves == "as a follower":
        first = await attached(gateway, request, shared=True, resume_ms=1000)
        second = await attached(gateway, request, shared=True, resume_ms=1000)
        assert first.following
        gateway.inflight.client_left(second)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gateway.inflight.idle(), 0.05)
        gateway.inflight.client_left(first)
    else:
        gateway.scripts.pause["attach"] = asyncio.Event()
        tasks = []
        for _ in range(2):
            tasks.append(asyncio.ensure_future(attached(gateway, request, shared=True, resume_ms=1000)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if leaves == "before it is displaced":
                tasks[0].cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        gateway.scripts.pause.pop("attach").set()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait_for(gateway.inflight.idle(), 5)


async def test_a_call_that_was_made_before_is_not_ended_by_one_that_was_given_up(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two equal calls does not learn whether it was admitted: what is there is the first one's."""
    monkeypatch.setattr("services.gateway.admitting.ADMIT_TIMEOUT_S", 0.05)
    repeat = Repeat("k", "d")
    first = await submitted(gateway, repeat=repeat)
    with pytest.raises(Repeated) as repeated:
        await submitted(other, repeat=repeat)
    assert repeated.value.rid == first.rid
    other.scripts.late["admit"] = asyncio.Event()
    with pytest.raises(TryLater):
        await submitted(other, repeat=repeat)
    await other.inflight.settle()
    assert other.inflight.requests == []
    assert await reader_of(gateway, first) == ("queued", gateway.inflight.incarnation, 1)


async def test_a_call_whose_admission_was_given_up_is_there_for_one_that_repeats_it(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.admitting.ADMIT_TIMEOUT_S", 0.05)
    gateway.scripts.late["admit"] = asyncio.Event()
    with pytest.raises(TryLater):
        await submitted(gateway, repeat=Repeat("k", "d"), resume_ms=9000)
    await gateway.inflight.settle()
    with pytest.raises(Repeated) as repeated:
        await submitted(other, repeat=Repeat("k", "d"))
    record = await other.records.sequence(f"{repeated.value.rid}.0")
    assert record is not None and (record.state, record.gateway) == ("queued", "")


async def test_an_admission_whose_reply_was_lost_is_its_own(gateway: Gateway) -> None:
    gateway.scripts.lose = ["admit"]
    request = await submitted(gateway, repeat=Repeat("k", "d"))
    assert gateway.inflight.requests == [request]


async def test_an_end_is_told_to_who_comes_back_after_it(gateway: Gateway, other: Gateway, worker: FakeWorker) -> None:
    request = await submitted(gateway)
    sid = request.open_sids[0]
    await worker.place(sid)
    await worker.commit(sid, [1], "length")
    again = await attached(other, request)
    assert again.ended_before == {0}
    events = await other.inflight.take(again)
    assert ids_of(events) == [1] and isinstance(events[-1][1], Outcome)
