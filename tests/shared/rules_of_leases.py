"""Rules of leases and terms, and of the plans that need them."""

from __future__ import annotations

from tests.shared.script_rules import RuleBook
from tests.shared.script_world import HOUR_MS, World

SAME_MS = 20  # as two keys that a script gave one end are read: the clock moves within it

rules = RuleBook()


@rules.rule(
    "a term grows only when the lease is taken",
    "take_lease",
    "return {tonumber(redis.call('HGET', P .. 'term', field)), owner}",
    "return {redis.call('HINCRBY', P .. 'term', field, 1), owner}",
)
async def _(w: World) -> None:
    for _ in range(3):
        assert await w.scripts.take_lease("run", "w", "s", 1000) == (1, "s")


@rules.rule("a holder keeps its lease alive", "take_lease", "redis.call('PEXPIRE', lease, lease_ms)")
async def _(w: World) -> None:
    await w.scripts.take_lease("run", "w", "s", 1000)
    await w.scripts.take_lease("run", "w", "s", HOUR_MS)
    assert await w.redis.pttl(w.key("lease:run:w")) > 1000


@rules.rule("a lease expires", "take_lease", ", 'PX', lease_ms)", ")")
async def _(w: World) -> None:
    await w.scripts.take_lease("run", "w", "s", 1000)
    assert 0 < await w.redis.pttl(w.key("lease:run:w")) <= 1000


@rules.rule("another's lease is respected", "take_lease", "if holder then return {0, holder} end")
async def _(w: World) -> None:
    await w.scripts.take_lease("run", "w", "s", HOUR_MS)
    before = await w.redis.get(w.key("lease:run:w")), await w.redis.hgetall(w.key("term"))
    assert await w.scripts.take_lease("run", "w", "s2", HOUR_MS) == (0, "s")
    assert (await w.redis.get(w.key("lease:run:w")), await w.redis.hgetall(w.key("term"))) == before


@rules.rule(
    "a term survives its lease",
    "take_lease",
    "redis.call('HINCRBY', P .. 'term', field, 1)",
    "redis.call('HSET', P .. 'term', field, 1) and 1",
)
async def _(w: World) -> None:
    terms = []
    for owner in ("s", "s2", "s"):
        terms.append((await w.scripts.take_lease("run", "w", owner, HOUR_MS))[0])
        await w.redis.delete(w.key("lease:run:w"))
    assert terms == [1, 2, 3] and await w.redis.pttl(w.key("term")) == -1


@rules.rule("leases of both kinds have their own terms", "take_lease", "kind .. ':' .. id\n", "id\n")
async def _(w: World) -> None:
    assert await w.scripts.take_lease("run", "w", "s", HOUR_MS) == (1, "s")
    assert await w.scripts.take_lease("pool", "w", "c", HOUR_MS) == (1, "c")


@rules.rule("only its holder drops a lease", "drop_lease", "if redis.call('GET', lease) ~= ARGV[3] then return 0 end")
async def _(w: World) -> None:
    await w.scripts.take_lease("run", "w", "s", HOUR_MS)
    assert not await w.scripts.drop_lease("run", "w", "s2")
    assert await w.exists("lease:run:w")
    assert await w.scripts.drop_lease("run", "w", "s")
    assert await w.scripts.take_lease("run", "w", "s2", HOUR_MS) == (2, "s2")


# --- plans -----------------------------------------------------------------------------------------------------------


@rules.rule(
    "a plan change needs exactly the current term",
    "plan",
    "if redis.call('HGET', P .. 'term', kind .. ':' .. worker) ~= term then return {'fenced', ''} end",
)
async def _(w: World) -> None:
    await w.worker()
    await w.scripts.drop_lease("run", "w", "s")
    await w.scripts.take_lease("run", "w", "s2", HOUR_MS)
    for kind, term in (("run", 1), ("run", 3), ("pool", 2)):
        assert await w.scripts.plan(kind, "w", term, [b"x"]) == "fenced"
    assert await w.stream("plan:w") == []
    assert await w.scripts.plan("run", "w", 2, [b"x", b"y"]) == "ok"
    assert [dict(fields)[b"m"] for fields in await w.stream("plan:w")] == [b"x", b"y"]


@rules.rule("no plan is made for a worker that reads no more", "plan", "'NOMKSTREAM', ", "")
async def _(w: World) -> None:
    term = await w.worker()
    await w.redis.delete(w.key("plan:w"))
    assert await w.scripts.plan("run", "w", term, [b"x"]) == "gone"
    assert not await w.exists("plan:w")


@rules.rule(
    "a numbered plan call is carried out once",
    "plan",
    "if of_term == term and tonumber(number) <= tonumber(last) then return {'ok', ''} end",
)
async def _(w: World) -> None:
    term = await w.worker()
    for number in (7, 7, 8, 8):
        assert await w.scripts.plan("run", "w", term, [b"%d" % number], number) == "ok"
    assert [dict(fields)[b"m"] for fields in await w.stream("plan:w")] == [b"7", b"8"]


@rules.rule("a numbered plan call that comes again later than the next is not carried out either", "plan", "<=", "==")
async def _(w: World) -> None:
    term = await w.worker()
    for number in (9, 10, 9, 10, 11):
        assert await w.scripts.plan("run", "w", term, [b"%d" % number], number) == "ok"
    assert [dict(fields)[b"m"] for fields in await w.stream("plan:w")] == [b"9", b"10", b"11"]


@rules.rule(
    "the numbers of plan calls end with the worker's plan, whoever is left",
    "plan",
    "redis.call('PEXPIRE', planned, redis.call('PTTL', P .. 'plan:' .. worker))",
)
async def _(w: World) -> None:
    term = await w.worker()
    await w.scripts.plan("run", "w", term, [b"x"], 7)
    plan_ms = await w.redis.pttl(w.key("plan:w"))  # first: time passes between the two looks
    assert 0 < await w.redis.pttl(w.key("planned:w")) <= plan_ms + SAME_MS


@rules.rule("numbers of plan calls belong to a term", "plan", "of_term == term and", "of_term and")
async def _(w: World) -> None:
    await w.worker()
    await w.scripts.plan("run", "w", 1, [b"x"], 7)
    await w.scripts.drop_lease("run", "w", "s")
    await w.scripts.take_lease("run", "w", "s2", HOUR_MS)
    await w.scripts.plan("run", "w", 2, [b"y"], 7)
    assert len(await w.stream("plan:w")) == 2
