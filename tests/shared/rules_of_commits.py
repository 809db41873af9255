"""Rules of `commit`: no committed token is lost, repeated or changed, and every gateway is told once."""

from __future__ import annotations

from shared.scripts import CommitCode
from shared.wire import encode
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import HOUR_MS, STOP, World, entry

rules = RuleBook()
END = encode(STOP)


@rules.rule("a chunk is appended where the log ends", "commit", "redis.call('RPUSH', s .. ':log', chunk)")
async def _(w: World) -> None:
    await w.placed()
    assert await w.commit(entry(chunk=b"a")) == [(CommitCode.APPENDED, 1)]
    assert await w.commit(entry(first=1, count=2, chunk=b"b")) == [(CommitCode.APPENDED, 3)]
    assert await w.log() == [b"a", b"b"]


@rules.rule("the length of the log is kept", "commit", "redis.call('HSET', s, 'num_tokens', length)")
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=2))
    assert (await w.sequence()).num_tokens == 2


@rules.rule(
    "a gap is not appended", "commit", "if count > 0 and first == length then", "if count > 0 and first >= length then"
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(chunk=b"a"))
    assert await w.commit(entry(first=2, chunk=b"c")) == [(CommitCode.FROM, 1)]
    assert await w.log() == [b"a"] and await w.told() == [b"r.0"]


@rules.rule(
    "an overlap is not appended",
    "commit",
    "if count > 0 and first == length then",
    "if count > 0 and first <= length and last > length then",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=2, chunk=b"a"))
    assert await w.commit(entry(first=1, count=2, chunk=b"b")) == [(CommitCode.FROM, 2)]
    assert await w.log() == [b"a"]


@rules.rule(
    "a repeat is not appended",
    "commit",
    "  elseif count > 0 or last < length then\n    code = 1",
    "  elseif count > 0 then\n    redis.call('RPUSH', s .. ':log', chunk)\n    code = 1",
)
async def _(w: World) -> None:
    await w.placed()
    for expected in (CommitCode.APPENDED, CommitCode.HAVE):
        assert await w.commit(entry(count=2, chunk=b"a")) == [(expected, 2)]
    assert await w.log() == [b"a"] and await w.told() == [b"r.0"]


@rules.rule("a repeat is told from an append", "commit", "  elseif count > 0 or last < length then\n    code = 1\n", "")
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=2))
    assert await w.commit(entry(count=2)) == [(CommitCode.HAVE, 2)]
    assert await w.commit(entry(count=1)) == [(CommitCode.HAVE, 2)]
    assert await w.commit(entry(count=0)) == [(CommitCode.HAVE, 2)]


@rules.rule("no tokens change nothing", "commit", "if count > 0 and first == length then", "if first == length then")
async def _(w: World) -> None:
    await w.placed()
    assert await w.commit(entry(count=0)) == [(CommitCode.APPENDED, 0)]
    assert await w.log() == [] and await w.told() == []


@rules.rule(
    "a log that lost its end says so, also to no tokens",
    "commit",
    "  elseif last > length then",
    "  elseif count > 0 and last > length then",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=2))
    assert await w.commit(entry(first=3, count=0, outcome=END)) == [(CommitCode.FROM, 2)]
    assert (await w.sequence()).state == "placed"


@rules.rule(
    "another epoch's commit is stale", "commit", "if f[1] ~= 'placed' or f[2] ~= epoch then", "if f[1] ~= 'placed' then"
)
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.requeue("r.0", 1)
    await w.scripts.assign("r.0", 1, "w", 1, b"admit")
    assert await w.commit(entry(epoch=1), entry(epoch=3)) == [(CommitCode.STALE, 0)] * 2
    assert await w.log() == []
    assert await w.commit(entry(epoch=2)) == [(CommitCode.APPENDED, 1)]


@rules.rule(
    "a commit of a sequence that is queued again is stale",
    "commit",
    "if f[1] ~= 'placed' or f[2] ~= epoch then",
    "if f[2] ~= epoch then",
)
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.requeue("r.0", 1)
    assert await w.commit(entry(epoch=1)) == [(CommitCode.STALE, 0)]
    assert await w.log() == []


@rules.rule(
    "after the end nothing is appended",
    "commit",
    "if f[1] == 'done' then return {4, length} end\n  if f[1] ~= 'placed' or f[2] ~= epoch",
    "if f[2] ~= epoch",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(chunk=b"a"))
    await w.scripts.finish("r.0", STOP)
    assert await w.commit(entry(first=1, chunk=b"b")) == [(CommitCode.DONE, 1)]
    assert await w.log() == [b"a"] and await w.told() == [b"r.0", b"!r.0"]


@rules.rule(
    "a repeat of the last chunk after the end is answered",
    "commit",
    "if f[1] == 'done' then return {4, length} end",
    "",
)
async def _(w: World) -> None:
    await w.placed()
    last = entry(count=2, chunk=b"a", outcome=END)
    assert await w.commit(last) == [(CommitCode.APPENDED, 2)]
    assert await w.commit(last) == [(CommitCode.DONE, 2)]
    assert await w.log() == [b"a"] and await w.told() == [b"r.0", b"!r.0"]


@rules.rule(
    "a commit for a record that is gone ends at the worker",
    "commit",
    "if not f[1] then return {4, 0} end",
    "if not f[1] then return {3, 0} end",
)
async def _(w: World) -> None:
    await w.worker()
    assert await w.commit(entry()) == [(CommitCode.DONE, 0)]


@rules.rule(
    "a commit ends a sequence only with its whole log",
    "commit",
    "if outcome ~= '' and last == length then",
    "if outcome ~= '' then",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=3))
    assert await w.commit(entry(first=0, count=1, outcome=END)) == [(CommitCode.HAVE, 3)]
    assert (await w.sequence()).state == "placed"


@rules.rule(
    "an end comes through also if its chunk is there already",
    "commit",
    "if outcome ~= '' and last == length then",
    "if outcome ~= '' and code == 0 and last == length then",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=3))
    assert await w.commit(entry(count=3, outcome=END)) == [(CommitCode.HAVE, 3)]
    assert (await w.sequence()).state == "done"


@rules.rule(
    "an end needs no tokens",
    "commit",
    "if outcome ~= '' and last == length then",
    "if outcome ~= '' and count > 0 and last == length then",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=0, outcome=END))
    record = await w.sequence()
    assert record.state == "done" and record.outcome == END and await w.told() == [b"!r.0"]


@rules.rule("a sequence that a commit ends leaves the worker", "common", "redis.call('SREM', P .. 'on:' .. f[3], sid)")
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(outcome=END))
    assert await w.records.placed_on("w") == []


# --- telling ---------------------------------------------------------------------------------------------------------


@rules.rule(
    "one entry a gateway and commit",
    "commit",
    "  local entry = entries[gateway]\n",
    "  if true then return redis.call('XADD', P .. 'out:' .. gateway, '*', field, value) end\n"
    "  local entry = entries[gateway]\n",
)
async def _(w: World) -> None:
    await w.placed("r", 3)
    await w.gateway("g2")
    await w.scripts.attach("r", "g2")
    await w.admit("q")
    await w.scripts.assign("q.0", 0, "w", 1, b"admit")
    await w.commit(entry("r.0", outcome=END), entry("r.1"), entry("q.0"), entry("r.2"))
    assert [len(fields) for fields in await w.stream("out:g2")] == [4]
    assert (await w.told())[-1] == b"q.0" and len(await w.stream("out:g")) == 1 + 3  # and three `moved`


@rules.rule(
    "a chunk comes before its end",
    "commit",
    "    tell(f[4], '!' .. sid, outcome)",
    "    table.insert(entries[f[4]], 1, outcome)\n    table.insert(entries[f[4]], 1, '!' .. sid)",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(chunk=b"a", outcome=END))
    assert await w.stream("out:g") == [[(b"r.0", b"a"), (b"!r.0", END)]]


@rules.rule(
    "chunks go to the gateway that the record names now", "commit", "tell(f[4], sid, chunk)", "tell('g', sid, chunk)"
)
async def _(w: World) -> None:
    await w.placed()
    await w.gateway("g2")
    await w.scripts.attach("r", "g2")
    await w.commit(entry())
    assert await w.told("g2") == [b"r.0"] and await w.told("g") == [b">r.0"]


@rules.rule(
    "nothing is written for a dead gateway",
    "commit",
    "redis.call('XADD', P .. 'out:' .. gateway, 'NOMKSTREAM', ",
    "redis.call('XADD', P .. 'out:' .. gateway, ",
)
async def _(w: World) -> None:
    await w.placed()
    await w.redis.delete(w.key("out:g"))
    assert await w.commit(entry(chunk=b"a")) == [(CommitCode.APPENDED, 1)]
    assert not await w.exists("out:g") and await w.log() == [b"a"]


@rules.rule(
    "the report goes to the scheduler",
    "commit",
    "if report ~= '' then redis.call('XADD'",
    "if false then redis.call('XADD'",
)
async def _(w: World) -> None:
    await w.placed()
    await w.join("scheduler", "s", "inbox:s")
    await w.commit(report=b"x")
    await w.commit(report=b"")
    assert await w.stream("inbox:s") == [[(b"m", b"x")]]


@rules.rule(
    "nothing is written for a dead scheduler",
    "commit",
    "P .. 'inbox:' .. inbox, 'NOMKSTREAM', ",
    "P .. 'inbox:' .. inbox, ",
)
async def _(w: World) -> None:
    await w.placed()
    assert await w.commit(entry(), report=b"x") == [(CommitCode.APPENDED, 1)]
    assert not await w.exists("inbox:s")


# --- the worker's lease ----------------------------------------------------------------------------------------------


@rules.rule(
    "a worker whose lease has lapsed commits nothing", "commit", "== 0 then return {'lapsed'} end", "== 2 then end"
)
async def _(w: World) -> None:
    await w.placed()
    await w.join("scheduler", "s", "inbox:s")
    await w.redis.delete(w.key("lease:worker:w"))
    before = await w.everything()
    assert await w.commit(entry(), report=b"x") is None
    assert await w.everything() == before


@rules.rule(
    "a commit refreshes the worker's lease",
    "commit",
    "redis.call('PEXPIRE', P .. 'lease:worker:' .. worker, lease_ms)",
    "redis.call('EXISTS', P .. 'lease:worker:' .. worker)",
)
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(), lease_ms=2 * HOUR_MS)
    assert await w.redis.pttl(w.key("lease:worker:w")) > HOUR_MS
