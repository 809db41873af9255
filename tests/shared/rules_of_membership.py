"""Rules of joining, leaving and clean-up, and of what a full server must still do."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from shared.bus import CannotWrite
from shared.protocol import Event, Member
from shared.scripts import STREAM_TTL_MS
from shared.wire import encode
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import HOUR_MS, World

T = TypeVar("T")
rules = RuleBook()


# --- membership ------------------------------------------------------------------------------------------------------


@rules.rule(
    "who joins has a lease", "join", "redis.call('SET', P .. 'lease:' .. kind .. ':' .. id, id, 'PX', lease_ms)"
)
async def _(w: World) -> None:
    await w.scripts.join(Member(kind="worker", incarnation="w"), 1000, ["plan:w"])
    assert 0 < await w.redis.pttl(w.key("lease:worker:w")) <= 1000
    assert await w.records.members() == {"w": (Member(kind="worker", incarnation="w"), True)}


@rules.rule(
    "who joins reads what is written from then on",
    "join",
    "ids[#ids + 1] = redis.call('XADD', P .. ARGV[i], '*', 'born', id)",
    "ids[#ids + 1] = '0-0'",
)
async def _(w: World) -> None:
    assert await w.redis.xadd(w.key("plan:w"), {"m": "x"}, nomkstream=True) is None
    ids = await w.scripts.join(Member(kind="worker", incarnation="w"), 1000, ["plan:w"])
    assert ids != ["0-0"]
    later = await w.redis.xadd(w.key("plan:w"), {"m": "x"}, nomkstream=True)
    assert [id for id, _ in await w.redis.xrange(w.key("plan:w"), f"({ids[0]}")] == [later]


@rules.rule("streams do not outlive their reader for long", "join", "redis.call('PEXPIRE', P .. ARGV[i], stream_ms)")
async def _(w: World) -> None:
    await w.gateway()
    assert 0 < await w.redis.pttl(w.key("out:g")) <= STREAM_TTL_MS


@rules.rule("joining is announced", "join", "announce(event)")
async def _(w: World) -> None:
    await w.gateway()
    assert await w.events() == [("joined", "g")]


@rules.rule(
    "who is dead says nothing more of itself",
    "amend",
    "if redis.call('EXISTS', P .. 'lease:' .. kind .. ':' .. id) == 0 then return 0 end",
)
async def _(w: World) -> None:
    await w.worker()
    draining = Member(kind="worker", incarnation="w", draining=True)
    await w.redis.delete(w.key("lease:worker:w"))
    assert not await w.scripts.amend(draining)
    assert not (await w.records.members())["w"][0].draining


@rules.rule("who amends what it says of itself is looked at", "amend", "announce(event)")
async def _(w: World) -> None:
    await w.worker()
    before = await w.events()
    assert await w.scripts.amend(Member(kind="worker", incarnation="w", draining=True))
    assert (await w.records.members())["w"][0].draining
    assert (await w.events())[len(before) :] == [("joined", "w")]


@rules.rule(
    "a lapsed lease is not refreshed",
    "refresh",
    "if redis.call('PEXPIRE', P .. 'lease:' .. kind .. ':' .. id, lease_ms) == 0 then return {'lapsed'} end",
    "redis.call('SET', P .. 'lease:' .. kind .. ':' .. id, id, 'PX', lease_ms)",
)
async def _(w: World) -> None:
    await w.gateway()
    assert await w.scripts.refresh("gateway", "g", HOUR_MS, {"out:g": "0-1"}) is not None
    await w.redis.delete(w.key("lease:gateway:g"))
    assert await w.scripts.refresh("gateway", "g", HOUR_MS, {"out:g": "0-1"}) is None
    assert not await w.exists("lease:gateway:g")


@rules.rule("refreshing keeps a stream alive", "refresh", "redis.call('PEXPIRE', stream, stream_ms)")
async def _(w: World) -> None:
    await w.gateway()
    await w.redis.pexpire(w.key("out:g"), 5000)
    await w.scripts.refresh("gateway", "g", HOUR_MS, {"out:g": "0-1"})
    assert await w.redis.pttl(w.key("out:g")) > 5000


@rules.rule(
    "a worker that lives keeps the numbers of its plan calls",
    "refresh",
    "if kind == 'worker' then redis.call('PEXPIRE', P .. 'planned:' .. id, stream_ms) end",
)
async def _(w: World) -> None:
    term = await w.worker()
    await w.scripts.plan("run", "w", term, [b"x"], 7)
    await w.redis.pexpire(w.key("planned:w"), 5000)
    await w.scripts.refresh("worker", "w", HOUR_MS, {"plan:w": "0-1"})
    assert await w.redis.pttl(w.key("planned:w")) > 5000


@rules.rule(
    "refreshing tells the last id of a stream, and that it is gone",
    "refresh",
    "last[1] and last[1][1] or ''",
    "ARGV[i + 1]",
)
async def _(w: World) -> None:
    await w.gateway()
    last = (await w.redis.xadd(w.key("out:g"), {"a": "b"})).decode()
    assert await w.scripts.refresh("gateway", "g", HOUR_MS, {"out:g": "0-1"}) == [last]
    await w.redis.delete(w.key("out:g"))
    assert await w.scripts.refresh("gateway", "g", HOUR_MS, {"out:g": last}) == [""]


@rules.rule(
    "refreshing trims what is handled",
    "refresh",
    "redis.call('XTRIM', stream, 'MINID', ARGV[i + 1])",
    "redis.call('EXISTS', stream)",
)
async def _(w: World) -> None:
    await w.gateway()
    ids = [(await w.redis.xadd(w.key("out:g"), {"a": str(i)})).decode() for i in range(4)]
    await w.scripts.refresh("gateway", "g", HOUR_MS, {"out:g": ids[1]})
    assert await w.stream("out:g") == [[(b"a", b"1")], [(b"a", b"2")], [(b"a", b"3")]]


@rules.rule("refreshing trims only what is handled", "refresh", "'MINID', ARGV[i + 1])", "'MINID', last[1][1])")
async def _(w: World) -> None:
    await w.gateway()
    ids = [(await w.redis.xadd(w.key("out:g"), {"a": str(i)})).decode() for i in range(4)]
    await w.scripts.refresh("gateway", "g", HOUR_MS, {"out:g": ids[2]})
    assert [dict(f)[b"a"] for f in await w.stream("out:g")] == [b"2", b"3"]


@rules.rule("who leaves has no lease", "gone", "redis.call('DEL', P .. 'lease:' .. kind .. ':' .. id)")
async def _(w: World) -> None:
    await w.worker()
    await w.scripts.gone("worker", "w")
    assert not await w.exists("lease:worker:w")


@rules.rule("leaving is announced", "gone", "announce(ARGV[3])")
async def _(w: World) -> None:
    await w.gateway()
    await w.scripts.gone("gateway", "g")
    assert (await w.events())[-1] == ("left", "g")


@rules.rule(
    "who leaves work behind is remembered until that is done",
    "gone",
    "if kind == 'gateway' or kind == 'store' then",
    "if true then",
)
async def _(w: World) -> None:
    await w.worker()
    await w.join("scheduler", "s", "inbox:s")
    await w.join("store", "c", "cache:c")
    await w.gateway()
    for kind, id in (("worker", "w"), ("scheduler", "s"), ("store", "c"), ("gateway", "g")):
        await w.scripts.gone(kind, id)
    assert sorted(await w.records.members()) == ["s", "w"]


@rules.rule(
    "who leaves nothing behind is forgotten at once",
    "gone",
    "if kind == 'gateway' or kind == 'store' then",
    "if false then",
)
async def _(w: World) -> None:
    await w.gateway()
    await w.scripts.gone("gateway", "g")
    assert await w.records.members() == {}


# --- clean-up --------------------------------------------------------------------------------------------------------


@rules.rule(
    "a live worker is not buried",
    "bury",
    "if redis.call('EXISTS', P .. 'lease:worker:' .. worker) == 1 then return 0 end",
)
async def _(w: World) -> None:
    await w.worker()
    assert not await w.scripts.bury("w")
    assert await w.exists("plan:w")


@rules.rule(
    "a worker is not buried while sequences are placed there",
    "bury",
    "if redis.call('SCARD', P .. 'on:' .. worker) > 0 then return 0 end",
)
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.gone("worker", "w")
    assert not await w.scripts.bury("w")
    assert sorted(await w.records.members()) == ["g", "w"]
    await w.scripts.requeue("r.0", 1)
    assert await w.scripts.bury("w")


@rules.rule(
    "a buried worker leaves nothing", "bury", "redis.call('DEL', P .. 'plan:' .. worker, P .. 'planned:' .. worker)"
)
async def _(w: World) -> None:
    term = await w.worker()
    await w.scripts.plan("run", "w", term, [b"x"], 1)
    await w.scripts.gone("worker", "w")
    assert await w.scripts.bury("w")
    assert await w.records.members() == {}
    assert not [k async for k in w.redis.scan_iter(match="*w*") if not k.endswith(b"lease:run:w")]


@rules.rule(
    "a live scheduler is not forgotten",
    "forget_scheduler",
    "if redis.call('EXISTS', P .. 'lease:scheduler:' .. scheduler) == 1 then return 0 end",
)
async def _(w: World) -> None:
    await w.join("scheduler", "s", "inbox:s")
    await w.read_queue("s")
    assert not await w.scripts.forget_scheduler("s")
    assert "s" in await w.records.members()


@rules.rule(
    "a dead scheduler is not forgotten while it holds entries",
    "forget_scheduler",
    "if redis.call('XPENDING', stream, 'schedulers', '-', '+', 1, scheduler)[1] then return 0 end",
)
async def _(w: World) -> None:
    for name in ("s", "s2"):
        await w.join("scheduler", name)
        await w.admit(f"r-{name}")
        await w.read_queue(name)
        await w.scripts.gone("scheduler", name)
    await w.redis.xautoclaim(w.key("requests"), "schedulers", "s3", 0, count=1)  # what s had
    assert not await w.scripts.forget_scheduler("s2")
    assert await w.num_pending() == 2
    assert await w.scripts.forget_scheduler("s")
    assert list(await w.records.members()) == ["s2"]
    assert {c["name"] for c in await w.redis.xinfo_consumers(w.key("requests"), "schedulers")} == {b"s2", b"s3"}


@rules.rule(
    "the queue's group is there when a scheduler has joined",
    "join",
    "if kind == 'scheduler' then open_queue() end",
)
async def _(w: World) -> None:
    await w.admit("r")
    await w.join("scheduler", "s", "inbox:s")
    await w.join("scheduler", "s2", "inbox:s2")
    groups = await w.redis.xinfo_groups(w.key("requests"))
    assert [(g["name"], g["last-delivered-id"]) for g in groups] == [(b"schedulers", b"0-0")]


@rules.rule(
    "a queue that Redis has lost is made again, and one that it has is left alone",
    "open_queue",
    "open_queue()\n",
)
async def _(w: World) -> None:
    await w.scripts.open_queue()
    assert await w.exists("requests")
    await w.admit("r")
    assert await w.read_queue("s") == 1
    await w.scripts.open_queue()
    assert await w.num_pending() == 1 and await w.read_queue("s") == 0
    assert [g["name"] for g in await w.redis.xinfo_groups(w.key("requests"))] == [b"schedulers"]
    await w.redis.delete(w.key("requests"))
    await w.scripts.open_queue()
    assert await w.exists("requests")


# --- messages --------------------------------------------------------------------------------------------------------


@rules.rule("nothing is sent to who reads no more", "send", "'NOMKSTREAM', ", "")
async def _(w: World) -> None:
    assert not await w.scripts.send("cache:c", b"x")
    assert not await w.exists("cache:c")
    await w.join("store", "c", "cache:c")
    assert await w.scripts.send("cache:c", b"x")
    assert await w.stream("cache:c") == [[(b"m", b"x")]]


# --- a full server ---------------------------------------------------------------------------------------------------

RUN_WHEN_FULL = ("common", "redis.call('DEL', P .. 'absent')")


@rules.rule("on a full server sequences are assigned", *RUN_WHEN_FULL)
async def _(w: World) -> None:
    term = await w.worker()
    await w.admit("r")
    async with w.full_server():
        assert await refused_as_full(w.scripts.assign("r.0", 0, "w", term, b"admit")) == "ok"


@rules.rule("on a full server clients attach", *RUN_WHEN_FULL)
async def _(w: World) -> None:
    await w.placed()
    async with w.full_server():
        assert (await refused_as_full(w.scripts.attach("r", "g2"))).status == "ok"


@rules.rule("on a full server services join", *RUN_WHEN_FULL)
async def _(w: World) -> None:
    async with w.full_server():
        assert await refused_as_full(w.scripts.join(Member(kind="gateway", incarnation="g"), HOUR_MS, ["out:g"]))


@rules.rule("on a full server plans are made", *RUN_WHEN_FULL)
async def _(w: World) -> None:
    term = await w.worker()
    async with w.full_server():
        assert await refused_as_full(w.scripts.plan("run", "w", term, [encode(Event(kind="run"))])) == "ok"


@rules.rule("on a full server leases are taken", *RUN_WHEN_FULL)
async def _(w: World) -> None:
    async with w.full_server():
        assert await refused_as_full(w.scripts.take_lease("run", "w", "s", HOUR_MS)) == (1, "s")


@rules.rule("on a full server messages are sent", *RUN_WHEN_FULL)
async def _(w: World) -> None:
    await w.join("store", "c", "cache:c")
    async with w.full_server():
        assert await refused_as_full(w.scripts.send("cache:c", b"call"))


@rules.rule("on a full server hints are given", *RUN_WHEN_FULL)
async def _(w: World) -> None:
    async with w.full_server():
        await refused_as_full(w.scripts.announce(Event(kind="pool")))
    assert await w.events() == [("pool", "")]


async def refused_as_full(call: Awaitable[T]) -> T:
    try:
        return await call
    except CannotWrite as e:
        raise AssertionError("refused on a full server") from e
