"""Rules of `offer`: how a queued sequence gets to the scheduler that leases its best worker."""

from __future__ import annotations

from tests.shared.script_rules import RuleBook
from tests.shared.script_world import World

rules = RuleBook()


async def queued(w: World) -> None:
    """A sequence that scheduler s has read, and scheduler s2, which has read nothing."""
    await w.join("scheduler", "s", "inbox:s")
    await w.join("scheduler", "s2", "inbox:s2")
    await w.admit("r")
    assert await w.read_queue("s") == 1


async def holders(w: World) -> list[str]:
    pending = await w.redis.xpending_range(w.key("requests"), "schedulers", "-", "+", 10)
    return [p["consumer"].decode() for p in pending]


@rules.rule(
    "an offer reaches the named scheduler",
    "offer",
    "redis.call('XADD', P .. 'inbox:' .. scheduler, 'NOMKSTREAM', '*', unpack(header[2]))",
    "true",
)
async def _(w: World) -> None:
    await queued(w)
    assert await w.scripts.offer("r.0", 0, "s2") == "ok"
    headers = [dict(fields) for fields in await w.stream("inbox:s2")]
    assert [(h[b"sid"], h[b"epoch"]) for h in headers] == [(b"r.0", b"0")]


@rules.rule(
    "who is offered a sequence holds its entry",
    "offer",
    "redis.call('XCLAIM', P .. 'requests', 'schedulers', scheduler, 0, f[3], 'JUSTID')",
)
async def _(w: World) -> None:
    await queued(w)
    await w.scripts.offer("r.0", 0, "s2")
    assert await holders(w) == ["s2"]


@rules.rule("a sequence is offered once an epoch", "offer", "if f[4] == epoch then return 'offered' end")
async def _(w: World) -> None:
    await queued(w)
    await w.scripts.offer("r.0", 0, "s2")
    assert await w.scripts.offer("r.0", 0, "s") == "offered"
    assert await holders(w) == ["s2"] and await w.stream("inbox:s") == []


@rules.rule(
    "only what waits at that epoch is offered",
    "offer",
    "if f[1] ~= 'queued' or f[2] ~= epoch then return 'stale' end",
    "f[3] = redis.call('XADD', P .. 'requests', '*', 'sid', sid)",
)
async def _(w: World) -> None:
    await w.placed()
    await w.join("scheduler", "s2", "inbox:s2")
    for epoch in (0, 1):
        assert await w.scripts.offer("r.0", epoch, "s2") == "stale"
    assert await w.scripts.offer("unknown.0", 0, "s2") == "stale"
    assert await w.stream("inbox:s2") == []


@rules.rule(
    "nothing is offered to the dead",
    "offer",
    "if redis.call('EXISTS', P .. 'lease:scheduler:' .. scheduler) == 0 then return 'gone' end",
)
async def _(w: World) -> None:
    await queued(w)
    await w.redis.delete(w.key("lease:scheduler:s2"))
    assert await w.scripts.offer("r.0", 0, "s2") == "gone"
    assert await holders(w) == ["s"]


@rules.rule("nothing is offered to who reads no more", "offer", "'NOMKSTREAM', ", "")
async def _(w: World) -> None:
    await queued(w)
    await w.redis.delete(w.key("inbox:s2"))
    assert await w.scripts.offer("r.0", 0, "s2") == "gone"
    assert not await w.exists("inbox:s2") and await holders(w) == ["s"]
