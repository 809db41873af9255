"""The store's shell on a real Redis: lives that end, and leases that several looks at the fleet take at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ConnectionError

from services.cache_store.service import StoreService
from shared import bus
from shared.leases import IDLE_LEASE_MS, Membership
from shared.protocol import Event, Member
from shared.scripts import Scripts
from shared.store_calls import Match, Matched
from shared.wire import decode_as, encode
from tests.helpers import wait_until

WORKER = Member(kind="worker", incarnation="w", num_blocks=8, block_size=4, variant="v")


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[StoreService]:
    redis = bus.connect(redis_url)
    service = StoreService(redis, "m", incarnation="first")
    await Membership(service.scripts, WORKER, ["plan:w"]).join()
    await service.start()
    yield service
    await redis.aclose()


async def lapse(store: StoreService) -> None:
    await store.redis.delete(store.scripts.key(f"lease:store:{store.incarnation}"))


async def test_a_store_leases_the_pool_of_a_worker(store: StoreService) -> None:
    assert list(store.core.pools) == ["w"]


async def test_a_life_that_has_lapsed_is_followed_by_another_that_owns_its_own_pools(store: StoreService) -> None:
    await lapse(store)
    await store.heartbeat()
    assert store.incarnation != "first"
    assert store.core.pools["w"].term == 2


async def test_a_new_life_whose_join_is_not_answered_is_tried_again(
    store: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = Scripts.join

    async def losing_reply(self: Scripts, member: Member, lease_ms: int, streams: list[str]) -> list[str]:
        monkeypatch.setattr(Scripts, "join", join)
        await join(self, member, lease_ms, streams)
        raise ConnectionError

    await lapse(store)
    monkeypatch.setattr(Scripts, "join", losing_reply)
    with pytest.raises(ConnectionError):
        await store.heartbeat()
    await store.read(0)
    await store.heartbeat()
    await store.heartbeat()
    assert list(store.core.pools) == ["w"]
    assert (await store.records.leases(["w"]))["w"][1] == store.incarnation
    stores = [incarnation for incarnation, (m, _) in (await store.records.members()).items() if m.kind == "store"]
    assert stores == [store.incarnation]  # none that nobody is


async def test_a_look_that_a_new_life_overtakes_gives_it_no_leases(
    store: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was taken under the old name is not the new life's."""
    taking, go_on, take_lease = asyncio.Event(), asyncio.Event(), Scripts.take_lease

    async def slow(self: Scripts, kind: str, id: str, owner: str, lease_ms: int) -> tuple[int, str]:
        answer = await take_lease(self, kind, id, owner, lease_ms)
        if owner == "first":
            taking.set()
            await go_on.wait()
        return answer

    monkeypatch.setattr(Scripts, "take_lease", slow)
    await store.redis.delete(store.scripts.key("lease:pool:w"))
    scanning = asyncio.ensure_future(store.scan())
    await taking.wait()
    await lapse(store)
    beating = asyncio.ensure_future(store.heartbeat())
    await wait_until(lambda: store.incarnation != "first")
    go_on.set()
    await asyncio.gather(scanning, beating)
    assert store.core.pools["w"].term == 3
    assert await store.scripts.take_lease("pool", "w", store.incarnation, IDLE_LEASE_MS) == (3, store.incarnation)


async def test_events_make_a_store_look(store: StoreService) -> None:
    await store.scripts.announce(Event(kind="joined", id="w-2"))
    await store.read(0)
    assert store._scan_now.is_set()


async def test_calls_are_handled_in_their_order_though_an_answer_is_lost(
    store: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read with the call whose answer was lost is not left to be repeated later, behind newer calls."""
    await Membership(store.scripts, Member(kind="scheduler", incarnation="s"), ["inbox:s"]).join()
    for number in (1, 2):
        call = Match(call=number, reply_to="inbox:s", worker="w", run_term=1, pool_term=1, salt=bytes(32), ids=bytes(4))
        await store.scripts.send("cache:first", encode(call))
    send = Scripts.send

    async def losing_reply(self: Scripts, stream: str, *messages: bytes) -> bool:
        monkeypatch.setattr(Scripts, "send", send)
        await send(self, stream, *messages)
        raise ConnectionError

    monkeypatch.setattr(Scripts, "send", losing_reply)
    with pytest.raises(ConnectionError):
        await store.read(0)
    await store.read(0)
    entries = await store.redis.xrange(store.scripts.key("inbox:s"))
    answers = [decode_as(Matched, fields[b"m"]).call for _, fields in entries if b"m" in fields]
    assert answers == [1, 2, 1, 2]
    await store.heartbeat()
    assert await store.redis.xlen(store.scripts.key("cache:first")) == 1, "what is handled is cut off"


async def test_who_is_said_to_be_gone_is_remembered_while_something_names_it(store: StoreService) -> None:
    """Else every incarnation that ever left would be."""
    await store.redis.set(store.scripts.key("lease:run:w"), "s-old")
    for id in ("w-long-ago", "s-old"):
        await store.scripts.announce(Event(kind="left", id=id))
    await store.read(0)
    await store.scan()
    assert store._said_gone == {"s-old"}
    await store.redis.delete(store.scripts.key("lease:run:w"))
    await store.scan()
    assert store._said_gone == set()
