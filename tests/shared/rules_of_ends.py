"""Rules of `finish`, `cancel_if`, `condemn` and `requeue`: one terminal state, and who may bring it about."""

from __future__ import annotations

from shared.protocol import Outcome
from shared.scripts import CommitCode, Repeat
from shared.wire import encode
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import CANCELLED, STOP, World, entry, spec_of

rules = RuleBook()
LENGTH = Outcome(reason="length")


@rules.rule(
    "finish ends a sequence once",
    "finish",
    "if not f[1] or f[1] == 'done' then return 0 end",
    "if not f[1] then return 0 end",
)
async def _(w: World) -> None:
    await w.placed()
    assert await w.scripts.finish("r.0", STOP)
    assert not await w.scripts.finish("r.0", LENGTH)
    assert (await w.sequence()).outcome == encode(STOP) and await w.told() == [b"!r.0"]


@rules.rule("finish does not end what a commit has ended", "finish", " or f[1] == 'done' then", " then")
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(outcome=encode(STOP)))
    assert not await w.scripts.finish("r.0", LENGTH)
    assert (await w.sequence()).outcome == encode(STOP) and await w.told() == [b"r.0", b"!r.0"]


@rules.rule(
    "a sequence ends also where the record of its request is gone, and makes none",
    "common",
    "if redis.call('EXISTS', r) == 0 then return end",
)
async def _(w: World) -> None:
    await w.placed()
    await w.redis.delete(w.key("r:r"))
    try:
        assert await w.scripts.finish("r.0", STOP)
    finally:
        assert not await w.exists("r:r")
    assert (await w.sequence()).state == "done" and await w.told() == [b"!r.0"]


@rules.rule("finish makes no record", "finish", "if not f[1] or f[1]", "if f[1]")
async def _(w: World) -> None:
    try:
        assert not await w.scripts.finish("r.0", STOP)
    finally:
        assert not await w.exists("s:r.0")


@rules.rule(
    "finish of an epoch is for exactly that one", "finish", "if epoch ~= '' and f[2] ~= epoch then return 0 end"
)
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.requeue("r.0", 1)
    await w.scripts.assign("r.0", 1, "w", 1, b"admit")
    assert not await w.scripts.finish("r.0", STOP, epoch=1)
    assert (await w.sequence()).state == "placed"
    assert await w.scripts.finish("r.0", STOP, epoch=2)


@rules.rule(
    "an end goes to the gateway that the record names now",
    "common",
    "P .. 'out:' .. gateway, 'NOMKSTREAM', '*', '!' .. sid",
    "P .. 'out:g', 'NOMKSTREAM', '*', '!' .. sid",
)
async def _(w: World) -> None:
    await w.placed()
    await w.gateway("g2")
    await w.scripts.attach("r", "g2")
    await w.scripts.finish("r.0", STOP)
    assert await w.stream("out:g2") == [[(b"!r.0", encode(STOP))]]


@rules.rule(
    "no end is written for a dead gateway",
    "common",
    "P .. 'out:' .. gateway, 'NOMKSTREAM', '*', '!' .. sid",
    "P .. 'out:' .. gateway, '*', '!' .. sid",
)
async def _(w: World) -> None:
    await w.placed()
    await w.redis.delete(w.key("out:g"))
    assert await w.scripts.finish("r.0", STOP)
    assert not await w.exists("out:g") and (await w.sequence()).state == "done"


# --- cancel ----------------------------------------------------------------------------------------------------------


@rules.rule("a cancel does nothing once another has attached", "cancel_if", " and f[2] == number then", " then")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.attach("r", "g2")
    assert await w.scripts.cancel_if(["r.0"], 1, CANCELLED) == 0
    assert (await w.sequence()).state == "placed"
    assert await w.scripts.cancel_if(["r.0"], 2, CANCELLED) == 1


@rules.rule("a cancel does not end what has ended", "cancel_if", "f[1] and f[1] ~= 'done' and f[2]", "f[1] and f[2]")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.finish("r.0", STOP)
    assert await w.scripts.cancel_if(["r.0"], 1, CANCELLED) == 0
    assert (await w.sequence()).outcome == encode(STOP) and await w.told() == [b"!r.0"]


@rules.rule(
    "a cancelled sequence leaves the queue", "common", "if f[1] == 'queued' then\n    dequeue(s)\n  elseif", "if"
)
async def _(w: World) -> None:
    await w.gateway()
    await w.admit("r", 2, tokens=5)
    await w.read_queue()
    assert await w.scripts.cancel_if(["r.0"], 1, CANCELLED) == 1
    assert await w.queue() == [("r.1", 0)] and await w.num_pending() == 1 and await w.queued_tokens() == 5
    assert await w.told() == [b"!r.0"]


@rules.rule("a cancel of a queued sequence is announced", "cancel_if", "if queued then announce(event) end")
async def _(w: World) -> None:
    await w.admit("r", 2)
    await w.scripts.cancel_if(["r.0"], 1, CANCELLED)
    assert await w.events() == [("cancelled", "r.0")]
    await w.scripts.cancel_if(["r.0", "r.1"], 1, CANCELLED)
    assert await w.events() == [("cancelled", "r.0"), ("cancelled", "r")]


@rules.rule(
    "a cancel of a running sequence needs no announcement",
    "cancel_if",
    "queued = queued or f[1] == 'queued'",
    "queued = true",
)
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.cancel_if(["r.0"], 1, CANCELLED)
    assert ("cancelled", "r.0") not in await w.events()
    assert await w.commit(entry()) == [(CommitCode.DONE, 0)]


@rules.rule("a condemned sequence is kept for people", "condemn", "keep_dead(sid, s, reason, deaths)")
async def _(w: World) -> None:
    await w.placed()
    assert await w.scripts.condemn("r.0", 1, LENGTH, "why", 3)
    dead = await w.records.dead(10)
    fields = {"sid": "r.0", "reason": "why", "deaths": "3", "prompt": "3", "output": "0", "worker": "w"}
    assert [(d.sid, d.fields) for d in dead] == [("r.0", fields)] and dead[0].at_s > 1.7e9
    assert (await w.sequence()).outcome == encode(LENGTH) and await w.told() == [b"!r.0"]


@rules.rule("a sequence is condemned at exactly that epoch", "condemn", "or f[2] ~= epoch then", "then")
async def _(w: World) -> None:
    await w.placed()
    assert not await w.scripts.condemn("r.0", 0, LENGTH, "why", 3)
    assert (await w.sequence()).state == "placed" and not await w.exists("dead")


@rules.rule("a sequence is condemned once", "condemn", "f[1] == 'done' or ", "")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.finish("r.0", STOP)
    assert not await w.scripts.condemn("r.0", 1, LENGTH, "why", 3)
    assert (await w.sequence()).outcome == encode(STOP)


@rules.rule("a retry is another request, which runs from the start", "retry", "'spec', spec, ", "")
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.commit(entry("r.0", count=2))
    for i in range(2):
        assert await w.scripts.condemn(f"r.{i}", 1, CANCELLED, "why", 3)
    assert await w.scripts.retry("r", spec_of("q", 2), 2, 1000) == "ok"
    assert await w.scripts.retry("r", spec_of("q", 2), 2, 1000) == "exists"
    assert await w.queue() == [("q.0", 0), ("q.1", 0)] and await w.redis.ttl(w.key("r:q")) == -1
    request, record = await w.records.request("q"), await w.sequence("q.1")
    assert request is not None and request.spec == spec_of("q", 2)
    assert (record.strikes, record.num_tokens, record.num_prompt_tokens) == (2, 0, 3)
    assert (await w.sequence("r.0")).state == "done"


@rules.rule("what has failed by itself is kept for people, once", "keep_dead", " or f[2] then", " then")
async def _(w: World) -> None:
    await w.placed()
    assert not await w.scripts.keep_dead("r.0", "why") and not await w.scripts.keep_dead("q.0", "why")
    await w.commit(entry("r.0", count=2))
    await w.scripts.finish("r.0", STOP)
    assert await w.scripts.keep_dead("r.0", "why") and not await w.scripts.keep_dead("r.0", "why")
    [kept] = await w.records.dead(10)
    assert kept.fields | {"worker": "w"} == {
        "sid": "r.0", "reason": "why", "deaths": "0", "prompt": "3", "output": "2", "worker": "w",
    }  # fmt: skip


@rules.rule("what has not ended is not kept for people", "keep_dead", "f[1] ~= 'done' or ", "")
async def _(w: World) -> None:
    await w.placed()
    assert not await w.scripts.keep_dead("r.0", "why")


@rules.rule("a retry is no answer to a repeated call", "retry", "'token_ms', 'repeat_key'", "'token_ms'")
async def _(w: World) -> None:
    """Its end would let the key of a newer call expire while that runs."""
    await w.placed(repeat=Repeat("k", "digest"))
    await w.scripts.finish("r.0", STOP)
    await w.scripts.retry("r", spec_of("q"), 2, 1000)
    await w.redis.persist(w.key("repeat:k"))
    await w.scripts.finish("q.0", STOP)
    assert await w.redis.ttl(w.key("repeat:k")) == -1


@rules.rule("a retry is a call of its own", "retry", ", 'call', 'requests', 'open_requests'")
async def _(w: World) -> None:
    await w.gateway()
    await w.ask_admission("r", more=[("r-1", 1, 3)])
    await w.scripts.finish("r-1.0", STOP)
    await w.scripts.retry("r-1", spec_of("q"), 2, 1000)
    await w.scripts.finish("q.0", STOP)
    assert await w.redis.pttl(w.key("r:q")) > 0 and await w.redis.pttl(w.key("r:r")) == -1


@rules.rule("a retry has no deadline of long ago", "retry", "'end_by', 0", "'end_by', record['end_by']")
async def _(w: World) -> None:
    await w.placed(time_limits={"total_ms": 1})
    await w.scripts.finish("r.0", STOP)
    await w.scripts.retry("r", spec_of("q"), 2, 1000)
    assert dict((await w.stream("requests"))[0])[b"end_by"] == b"0"


# --- requeue ---------------------------------------------------------------------------------------------------------


@rules.rule("requeue is for exactly that epoch", "requeue", "or f[2] ~= epoch then", "then")
async def _(w: World) -> None:
    await w.placed()
    for epoch in (0, 2):
        assert not await w.scripts.requeue("r.0", epoch)
    assert (await w.sequence()).state == "placed" and await w.queue() == []
    assert await w.scripts.requeue("r.0", 1)
    assert await w.queue() == [("r.0", 1)]


@rules.rule("only a placed sequence is queued again", "requeue", "if f[1] ~= 'placed' or f[2]", "if f[2]")
async def _(w: World) -> None:
    await w.placed("r", 2)
    await w.scripts.finish("r.0", STOP)
    assert not await w.scripts.requeue("r.0", 1)
    assert await w.scripts.requeue("r.1", 1)
    assert not await w.scripts.requeue("r.1", 1)
    assert (await w.sequence()).state == "done" and await w.queue() == [("r.1", 1)]


@rules.rule("requeue keeps the arrival", "common", "'arrival', f[4]", "'arrival', now_ms()")
async def _(w: World) -> None:
    await w.placed()
    await w.redis.hset(w.key("s:r.0"), "arrival_ms", 5)
    await w.scripts.requeue("r.0", 1)
    assert dict((await w.stream("requests"))[0])[b"arrival"] == b"5"


@rules.rule("requeue keeps the priority", "common", "'priority', f[3], 'arrival'", "'priority', 0, 'arrival'")
async def _(w: World) -> None:
    await w.placed(priority=-7)
    await w.scripts.requeue("r.0", 1)
    assert dict((await w.stream("requests"))[0])[b"priority"] == b"-7"


@rules.rule("requeue counts the tokens in the log", "common", "'output', f[2]", "'output', 0")
async def _(w: World) -> None:
    await w.placed(tokens=4)
    await w.commit(entry(count=3))
    await w.scripts.requeue("r.0", 1)
    fields = dict((await w.stream("requests"))[0])
    assert (fields[b"prompt"], fields[b"output"]) == (b"4", b"3") and await w.queued_tokens() == 4


@rules.rule(
    "requeue adds strikes", "requeue", "if strikes ~= '0' then redis.call('HINCRBY', s, 'strikes', strikes) end"
)
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.requeue("r.0", 1, strikes=1)
    assert dict((await w.stream("requests"))[0])[b"strikes"] == b"1"
    await w.scripts.assign("r.0", 1, "w", 1, b"admit")
    await w.scripts.requeue("r.0", 2)
    assert (await w.sequence()).strikes == 1


@rules.rule("requeue takes a sequence off its worker", "requeue", "redis.call('SREM', P .. 'on:' .. f[3], sid)")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.requeue("r.0", 1)
    assert await w.records.placed_on("w") == [] and (await w.sequence()).worker == ""
