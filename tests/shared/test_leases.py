"""An incarnation's life in Redis: joined, refreshed, lapsed, its streams lost, over."""

from __future__ import annotations

import pytest

from shared.leases import (
    BUSY_LEASE_MS,
    BUSY_REFRESH_MS,
    IDLE_LEASE_MS,
    IDLE_REFRESH_MS,
    Lapsed,
    Membership,
    StreamLost,
    new_incarnation,
)
from shared.protocol import Member
from tests.shared.script_world import World, world_at


def membership(w: World, streams: tuple[str, ...] = ("out:g", "more:g")) -> Membership:
    return Membership(w.scripts, Member(kind="gateway", incarnation="g"), list(streams))


async def test_joining_makes_the_streams(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        last = await membership(w).join()
        assert set(last) == {"out:g", "more:g"} and await w.exists("out:g") and await w.exists("more:g")
        assert 0 < await w.redis.pttl(w.key("lease:gateway:g")) <= IDLE_LEASE_MS
        await membership(w).refresh(last)


async def test_a_refresh_keeps_the_lease_and_trims(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        m = membership(w)
        handled = await m.join(lease_ms=BUSY_LEASE_MS)
        ids = [(await w.redis.xadd(w.key("out:g"), {"a": "b"})).decode() for _ in range(3)]
        await m.refresh(handled | {"out:g": ids[1], "events": "0-0"}, IDLE_LEASE_MS)
        assert await w.redis.pttl(w.key("lease:gateway:g")) > BUSY_LEASE_MS
        assert [id.decode() for id, _ in await w.redis.xrange(w.key("out:g"))] == ids[1:]


async def test_a_lapsed_lease_is_learnt_at_the_refresh(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        m = membership(w)
        handled = await m.join()
        await w.redis.delete(w.key("lease:gateway:g"))
        for _ in range(2):
            with pytest.raises(Lapsed):
                await m.refresh(handled)


async def test_a_stream_that_is_gone(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        m = membership(w)
        handled = await m.join()
        await w.redis.delete(w.key("more:g"))
        with pytest.raises(StreamLost, match="more:g"):
            await m.refresh(handled)


async def test_a_stream_that_is_younger_than_what_was_read(redis_url: str) -> None:
    """Redis came back with older data: what was read since is to be read from state."""
    async with world_at(redis_url) as w:
        m = membership(w)
        handled = await m.join()
        read = (await w.redis.xadd(w.key("out:g"), {"a": "b"})).decode()
        await m.refresh(handled | {"out:g": read})
        await w.redis.delete(w.key("out:g"))
        await w.redis.xadd(w.key("out:g"), {"a": "b"}, id="5-0")
        with pytest.raises(StreamLost, match="out:g"):
            await m.refresh(handled | {"out:g": read})


async def test_all_read_is_not_younger(redis_url: str) -> None:
    """Trimming up to what is handled never empties the stream, so its last id can always be compared."""
    async with world_at(redis_url) as w:
        m = membership(w)
        handled = await m.join()
        for _ in range(3):
            handled["out:g"] = (await w.redis.xadd(w.key("out:g"), {"a": "b"})).decode()
            await m.refresh(handled)
            await m.refresh(handled)
        assert await w.redis.xlen(w.key("out:g")) == 1


async def test_leaving_ends_it_at_once(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        m = membership(w)
        handled = await m.join()
        await m.leave()
        with pytest.raises(Lapsed):
            await m.refresh(handled)
        assert (await w.events())[-1] == ("left", "g")


def test_incarnations_are_unique_and_tell_their_kind() -> None:
    names = {new_incarnation(kind) for kind in ("gateway", "scheduler", "store", "worker") for _ in range(50)}
    assert len(names) == 200 and {name[:2] for name in names} == {"g-", "s-", "c-", "w-"}


def test_several_refreshes_fit_into_a_lease() -> None:
    assert BUSY_LEASE_MS >= 3 * BUSY_REFRESH_MS and IDLE_LEASE_MS >= 3 * IDLE_REFRESH_MS
