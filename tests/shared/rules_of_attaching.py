"""Rules of `attach` and of what remains after the end: who reads a request, and for how long it can be read."""

from __future__ import annotations

from shared.scripts import Attached
from shared.wire import encode
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import CANCELLED, HOUR_MS, STOP, World, entry

rules = RuleBook()


# --- attach ----------------------------------------------------------------------------------------------------------


@rules.rule(
    "a client's attach always wins, with a new number",
    "attach",
    "if number == '' or owner ~= gateway then",
    "if false then",
)
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.commit(entry("r.1", count=2))
    assert await w.scripts.attach("r", "g2") == Attached("ok", (("placed", 2, 0), ("placed", 2, 2)))
    assert await w.scripts.attach("r", "g3") == Attached("ok", (("placed", 3, 0), ("placed", 3, 2)))
    assert (await w.sequence("r.1")).gateway == "g3"


@rules.rule(
    "a client that comes back to its gateway gets a new number",
    "attach",
    "if number == '' or owner ~= gateway then",
    "if owner ~= gateway then",
)
async def _(w: World) -> None:
    await w.placed()
    assert await w.scripts.attach("r", "g") == Attached("ok", (("placed", 2, 0),))
    assert await w.told() == []


@rules.rule(
    "the old gateway learns the number under which another has it now",
    "attach",
    "redis.call('XADD', P .. 'out:' .. owner, 'NOMKSTREAM', '*', '>' .. sid, redis.call('HGET', s, 'attach'))",
)
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.scripts.attach("r", "g")
    await w.scripts.attach("r", "g2")
    assert await w.stream("out:g") == [[(b">r.0", b"3")], [(b">r.1", b"3")]]


@rules.rule(
    "no `moved` is written for a dead gateway",
    "attach",
    "P .. 'out:' .. owner, 'NOMKSTREAM', ",
    "P .. 'out:' .. owner, ",
)
async def _(w: World) -> None:
    await w.placed()
    await w.redis.delete(w.key("out:g"))
    assert (await w.scripts.attach("r", "g2")).status == "ok"
    assert not await w.exists("out:g")


@rules.rule(
    "a gateway that comes back loses to a newer attach",
    "attach",
    "if current ~= number and not repeated then return {'lost', n} end",
)
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.scripts.attach("r", "g2")
    before = await w.everything()
    assert await w.scripts.attach("r", "g-again", 1) == Attached("lost")
    assert await w.everything() == before


@rules.rule(
    "a lost attach changes nothing for any choice",
    "attach",
    "  for i = 0, n - 1 do\n    local current",
    "  for i = 0, 0 do\n    local current",
)
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.redis.hset(w.key("s:r.1"), "attach", 2)
    before = await w.everything()
    assert await w.scripts.attach("r", "g-again", 1) == Attached("lost")
    assert await w.everything() == before


@rules.rule(
    "a gateway that comes back is out of reach of older cancels",
    "attach",
    "if number == '' or owner ~= gateway then",
    "if number == '' then",
)
async def _(w: World) -> None:
    await w.placed()
    assert await w.scripts.attach("r", "g-again", 1) == Attached("ok", (("placed", 2, 0),))
    assert (await w.sequence()).gateway == "g-again"
    assert await w.scripts.cancel_if(["r.0"], 1, CANCELLED) == 0


@rules.rule(
    "a gateway's attach whose reply was lost is repeated",
    "attach",
    "if current ~= number and not repeated then",
    "if current ~= number then",
)
async def _(w: World) -> None:
    await w.placed("r", 2)
    first = await w.scripts.attach("r", "g-again", 1)
    before = await w.everything()
    assert await w.scripts.attach("r", "g-again", 1) == first
    assert await w.everything() == before


@rules.rule(
    "a repeat is the same gateway's",
    "attach",
    "owner == gateway and current == tostring(number + 1)",
    "current == tostring(number + 1)",
)
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.attach("r", "g-again", 1)
    assert await w.scripts.attach("r", "g-late", 1) == Attached("lost")


@rules.rule("what has expired cannot be attached to", "attach", "if n == 0 then return {'gone', 0} end")
async def _(w: World) -> None:
    assert (await w.scripts.attach("r", "g")).status == "gone"


# --- detach ----------------------------------------------------------------------------------------------------------


@rules.rule(
    "whom a client has left is read by nobody, from then on",
    "detach",
    "redis.call('HSET', s, 'gateway', '', 'orphan_at_ms', orphan_at)",
)
async def _(w: World) -> None:
    await w.placed("r", 2)
    assert await w.scripts.detach(["r.0", "r.1"], 1, 1000) == 2
    assert [(await w.sequence(sid)).gateway for sid in ("r.0", "r.1")] == ["", ""]
    await w.commit(entry("r.0", count=2), entry("r.1", outcome=encode(STOP)))
    assert await w.told() == []
    assert await w.scripts.attach("r", "g2") == Attached("ok", (("placed", 2, 2), ("done", 2, 1)))
    await w.commit(entry("r.0", first=2))
    assert await w.told("g2") == [] and not await w.exists("out:")


@rules.rule("who has attached meanwhile reads on", "detach", "f[2] == number and ", "")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.attach("r", "g2")
    assert await w.scripts.detach(["r.0"], 1, 1000) == 0
    assert (await w.sequence()).gateway == "g2"


@rules.rule("what has ended is not detached", "detach", "f[1] ~= 'done' and ", "")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.finish("r.0", STOP)
    before = await w.everything()
    assert await w.scripts.detach(["r.0"], 1, 1000) == 0
    assert await w.everything() == before


@rules.rule("a repeated detach does not begin the time anew", "detach", " and f[3] ~= ''", "")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.detach(["r.0"], 1, 1000)
    before = await w.everything()
    assert await w.scripts.detach(["r.0"], 1, 9000) == 0
    assert await w.everything() == before


# --- keys of a finished request expire -------------------------------------------------------------------------------


async def expiring(w: World, *names: str) -> list[bool]:
    return [0 < await w.redis.pttl(w.key(name)) <= HOUR_MS for name in names]


@rules.rule(
    "no key expires before the last choice has ended",
    "common",
    "if redis.call('HINCRBY', r, 'open', -1) > 0 then return end",
    "redis.call('HINCRBY', r, 'open', -1)",
)
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.commit(entry("r.0", outcome=encode(STOP)))
    assert not any(await expiring(w, "r:r", "s:r.0", "s:r.0:log", "s:r.1"))
    await w.scripts.cancel_if(["r.1"], 1, CANCELLED)
    assert all(await expiring(w, "r:r", "s:r.0", "s:r.0:log", "s:r.1"))


@rules.rule("the request expires", "common", "redis.call('PEXPIRE', r, f[2])")
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(outcome=encode(STOP)))
    assert all(await expiring(w, "r:r"))


@rules.rule("its sequences expire", "common", "redis.call('PEXPIRE', s, f[2])")
async def _(w: World) -> None:
    await w.placed("r", 2)
    for i in (0, 1):
        await w.scripts.finish(f"r.{i}", STOP)
    assert all(await expiring(w, "s:r.0", "s:r.1"))


@rules.rule("its logs expire", "common", "redis.call('PEXPIRE', s .. ':log', f[2])")
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.commit(*(entry(f"r.{i}", outcome=encode(STOP)) for i in (0, 1)))
    assert all(await expiring(w, "s:r.0:log", "s:r.1:log"))
