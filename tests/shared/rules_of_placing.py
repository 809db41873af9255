"""Rules of `admit` and `assign`: how a request gets into the queue, and from there to a worker."""

from __future__ import annotations

from redis.exceptions import ResponseError

from shared.bus import CannotWrite
from shared.scripts import Repeat
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import CANCELLED, STOP, World, spec_of

rules = RuleBook()


@rules.rule("admit does a thing once", "admit", "if redis.call('EXISTS', r) == 1 then return answer('exists', 0) end")
async def _(w: World) -> None:
    assert await w.admit("r", 2) == ("ok", 2)
    before = await w.everything()
    assert (await w.admit("r", 2))[0] == "exists"
    assert await w.everything() == before


@rules.rule(
    "a prompt is as long as is said: everybody counts with that",
    "admit",
    "if num < 1 or #ARGV[i + 3] ~= 4 * num then return redis.error_reply(too_odd) end",
)
async def _(w: World) -> None:
    before = await w.everything()
    for said, prompt in ((0, b""), (3, b""), (3, b"\1\0\0\0" * 2), (3, b"\1" * 11), (-1, b""), (1 << 62, b"\1\0\0\0")):
        spec = spec_of("r", 1, 3).model_copy(update={"num_prompt_tokens": said})
        for more in ([], [(spec_of("r-1", 1, 3), b"\1\0\0\0" * 3)]):
            refusal = ""
            try:
                await w.scripts.admit(
                    [*more, (spec, prompt)], gateway="g", owner="key", priority=0, max_requests=100, max_tokens=1 << 62,
                    retention_ms=1000,
                )  # fmt: skip
            except ResponseError as e:
                refusal = str(e)
            assert "not as long as is said" in refusal
    assert await w.everything() == before


@rules.rule(
    "a call with the repeat key of another is that one",
    "admit",
    "repeat_key ~= '' and redis.call('GET', P .. 'repeat:' .. repeat_key) or ",
    "",
)
async def _(w: World) -> None:
    repeat = Repeat("key", "digest")
    first = await w.ask_admission("r", more=[("r-1", 1, 3)], repeat=repeat)
    assert (first.status, first.rid) == ("ok", "r")
    before = await w.everything()
    second = await w.ask_admission("q", repeat=repeat)
    assert (second.status, second.rid) == ("exists", "r")
    assert await w.everything() == before
    assert (await w.ask_admission("p", repeat=Repeat("another", "digest"))).rid == "p"


@rules.rule(
    "a repeat key is forgotten with its call",
    "common",
    "if f[3] then redis.call('PEXPIRE', P .. 'repeat:' .. f[3], f[2]) end",
)
async def _(w: World) -> None:
    await w.ask_admission("r", repeat=Repeat("key", "digest"), retention_ms=60_000)
    assert await w.redis.pttl(w.key("repeat:key")) == -1
    await w.scripts.finish("r.0", STOP)
    assert 0 < await w.redis.pttl(w.key("repeat:key")) <= 60_000


@rules.rule(
    "a call of several prompts expires when the last of them has ended, all of it",
    "common",
    "if redis.call('HINCRBY', call, 'open_requests', -1) > 0 then return end",
)
async def _(w: World) -> None:
    """Else a client that comes back would be told that its call, which still runs, is not kept."""
    more = [("r-1", 2, 3), ("r-2", 1, 3)]
    await w.ask_admission("r", more=more, repeat=Repeat("key", "digest"), retention_ms=60_000)
    keys = ["r:r", "s:r.0", "r:r-1", "s:r-1.0", "s:r-1.1", "r:r-2", "s:r-2.0", "repeat:key"]
    for sid in ("r.0", "r-1.1", "r-2.0", "r-1.0"):
        assert [await w.redis.pttl(w.key(key)) for key in keys] == [-1] * len(keys)
        await w.scripts.finish(sid, STOP)
    assert all([0 < await w.redis.pttl(w.key(key)) <= 60_000 for key in keys])


@rules.rule("a prompt whose call is lost expires by itself", "common", " or redis.call('EXISTS', call) == 0", "")
async def _(w: World) -> None:
    await w.ask_admission("r", more=[("r-1", 1, 3)])
    await w.redis.delete(w.key("r:r"))
    await w.scripts.finish("r-1.0", STOP)
    assert await w.redis.pttl(w.key("r:r-1")) > 0 and not await w.redis.exists(w.key("r:r"))


@rules.rule(
    "a key that another call has by now is not freed",
    "free_key",
    "if redis.call('GET', named) ~= rid then return 0 end",
)
async def _(w: World) -> None:
    repeat = Repeat("key", "digest")
    await w.ask_admission("r", repeat=repeat)
    assert await w.scripts.free_key("key", "r") and not await w.scripts.free_key("key", "r")
    assert (await w.ask_admission("q", repeat=repeat)).rid == "q"
    assert not await w.scripts.free_key("key", "r")
    assert (await w.ask_admission("p", repeat=repeat)).rid == "q"


@rules.rule(
    "a call that has freed its key lets that of another live on",
    "free_key",
    "redis.call('HDEL', P .. 'r:' .. rid, 'repeat_key')",
)
async def _(w: World) -> None:
    await w.ask_admission("r", repeat=Repeat("key", "digest"))
    await w.scripts.free_key("key", "r")
    await w.ask_admission("q", repeat=Repeat("key", "digest"))
    await w.scripts.finish("r.0", STOP)
    assert await w.redis.pttl(w.key("repeat:key")) == -1


@rules.rule(
    "a repeat key whose call is not there names nothing",
    "admit",
    "if redis.call('EXISTS', r) == 1 then",
    "if rid ~= ARGV[first] or redis.call('EXISTS', r) == 1 then",
)
async def _(w: World) -> None:
    repeat = Repeat("key", "digest")
    await w.ask_admission("r", repeat=repeat)
    await w.redis.delete(w.key("r:r"))
    again = await w.ask_admission("q", repeat=repeat)
    assert (again.status, again.rid) == ("ok", "q")
    assert (await w.ask_admission("p", repeat=repeat)).rid == "q"


@rules.rule(
    "a repeated admit is accepted also when the queue is full meanwhile",
    "admit",
    "if redis.call('EXISTS', r) == 1 then",
    "if redis.call('XLEN', P .. 'requests') == 0 and redis.call('EXISTS', r) == 1 then",
)
async def _(w: World) -> None:
    await w.admit("r", max_requests=1)
    assert (await w.admit("r", max_requests=1))[0] == "exists"


@rules.rule(
    "the number of queued sequences is bounded",
    "admit",
    "if queued + n > max_requests then return answer('full_requests', queued) end",
)
async def _(w: World) -> None:
    assert await w.admit("a", 2, max_requests=3) == ("ok", 2)
    before = await w.everything()
    assert await w.admit("b", 2, max_requests=3) == ("full_requests", 2)
    assert await w.everything() == before
    assert await w.admit("c", 1, max_requests=3) == ("ok", 3)


@rules.rule(
    "the number of queued tokens is bounded",
    "admit",
    "if queued > 0 and tokens + num_tokens > max_tokens then return answer('full_tokens', tokens) end",
)
async def _(w: World) -> None:
    assert (await w.admit("a", 2, tokens=30, max_tokens=100))[0] == "ok"
    before = await w.everything()
    assert await w.admit("b", 2, tokens=21, max_tokens=100) == ("full_tokens", 60)
    assert await w.everything() == before
    assert (await w.admit("c", 2, tokens=20, max_tokens=100))[0] == "ok"


@rules.rule("a request larger than the bound is admitted to an empty queue", "admit", "queued > 0 and ", "")
async def _(w: World) -> None:
    assert (await w.admit("a", tokens=101, max_tokens=100))[0] == "ok"


@rules.rule(
    "of a call with several prompts all are admitted",
    "admit",
    "for i = first, #ARGV, 6 do\n  admit(",
    "for i = first, first, 6 do\n  admit(",
)
async def _(w: World) -> None:
    assert await w.admit("r", 1, tokens=3, more=[("r-1", 2, 5)]) == ("ok", 3)
    assert await w.queue() == [("r.0", 0), ("r-1.0", 0), ("r-1.1", 0)]
    assert await w.queued_tokens() == 13
    assert (await w.admit("r", 1, tokens=3, more=[("r-1", 2, 5)]))[0] == "exists"


@rules.rule(
    "of a call with several prompts none is admitted where one has no room",
    "admit",
    "n = n + ARGV[i + 1]",
    "n = 1",
)
async def _(w: World) -> None:
    assert (await w.admit("r", max_requests=2, more=[("r-1", 2, 3)]))[0] == "full_requests"
    assert await w.everything() == {}


@rules.rule(
    "the tokens of all prompts are counted together",
    "admit",
    "num_tokens = num_tokens + ARGV[i + 1] * ARGV[i + 2]",
    "num_tokens = ARGV[i + 1] * ARGV[i + 2]",
)
async def _(w: World) -> None:
    await w.admit("a")
    assert (await w.admit("r", tokens=50, max_tokens=100, more=[("r-1", 1, 50)]))[0] == "full_tokens"


@rules.rule(
    "how long a request goes on without a client stands with each of its sequences",
    "admit",
    "'arrival_ms', now, 'resume_ms', resume_ms, 'num_tokens'",
    "'arrival_ms', now, 'num_tokens'",
)
async def _(w: World) -> None:
    await w.admit("r", 2, resume_ms=7)
    readers, _ = await w.records.readers(["r.0", "r.1"])
    assert [reader.resume_ms for reader in readers.values()] == [7, 7]


@rules.rule(
    "a full server admits nothing, and not half of it",
    "admit",
    "local MINUTE_MS, ROUNDING = 60000, 1e-6",
    "run_when_full()\nlocal MINUTE_MS, ROUNDING = 60000, 1e-6",
)
async def _(w: World) -> None:
    async with w.full_server():
        try:
            await w.admit("r", 2)
        except CannotWrite:
            pass
    assert await w.everything() == {}


@rules.rule("the arrival is in Redis' time", "admit", "P .. 'open:' .. owner, now_ms()", "P .. 'open:' .. owner, 5")
async def _(w: World) -> None:
    def ms(time: tuple[int, int]) -> int:
        return time[0] * 1000 + time[1] // 1000

    before = ms(await w.redis.time())
    await w.admit("r")
    after = ms(await w.redis.time())
    queued = dict((await w.stream("requests"))[0])[b"arrival"]
    times = [queued, await w.redis.hget(w.key("r:r"), "arrival_ms"), await w.redis.hget(w.key("s:r.0"), "arrival_ms")]
    assert all(before <= int(t) <= after for t in times)


@rules.rule("queued tokens are counted", "common", "redis.call('HINCRBY', P .. 'queue', 'tokens', f[1])")
async def _(w: World) -> None:
    await w.admit("r", 2, tokens=5)
    assert await w.queued_tokens() == 10


# --- assign ----------------------------------------------------------------------------------------------------------


@rules.rule("only a queued sequence is assigned", "assign", "f[1] ~= 'queued' or f[2] ~= epoch", "f[2] ~= epoch")
async def _(w: World) -> None:
    term = await w.worker()
    await w.admit("r")
    await w.scripts.cancel_if(["r.0"], 1, CANCELLED)
    assert await w.scripts.assign("r.0", 0, "w", term, b"admit") == "stale"
    assert (await w.sequence()).state == "done" and await w.stream("plan:w") == []


@rules.rule("only exactly that epoch is assigned", "assign", "f[1] ~= 'queued' or f[2] ~= epoch", "f[1] ~= 'queued'")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.requeue("r.0", 1)
    for epoch in (0, 2):
        assert await w.scripts.assign("r.0", epoch, "w", 1, b"admit") == "stale"
    assert (await w.sequence()).state == "queued"
    assert await w.scripts.assign("r.0", 1, "w", 1, b"admit") == "ok"


@rules.rule(
    "only under exactly the current term is assigned",
    "assign",
    "if redis.call('HGET', P .. 'term', 'run:' .. worker) ~= term then return {'fenced', ''} end",
)
async def _(w: World) -> None:
    await w.worker()
    await w.redis.delete(w.key("lease:run:w"))
    assert await w.scripts.take_lease("run", "w", "s2", 1000) == (2, "s2")
    await w.admit("r")
    before = await w.everything()
    for term in (0, 1, 3):
        assert await w.scripts.assign("r.0", 0, "w", term, b"admit") == "fenced"
    assert await w.everything() == before
    assert await w.scripts.assign("r.0", 0, "w", 2, b"admit") == "ok"


@rules.rule(
    "an assigned sequence leaves the stream",
    "common",
    "if redis.call('XDEL', P .. 'requests', f[1]) == 1 then",
    "if true then",
)
async def _(w: World) -> None:
    await w.placed()
    assert await w.queue() == []


@rules.rule(
    "an assigned sequence is pending with nobody", "common", "redis.call('XACK', P .. 'requests', 'schedulers', f[1])"
)
async def _(w: World) -> None:
    term = await w.worker()
    await w.admit("r")
    assert await w.read_queue() == 1 and await w.num_pending() == 1
    assert await w.scripts.assign("r.0", 0, "w", term, b"admit") == "ok"
    assert await w.num_pending() == 0


@rules.rule("an assigned sequence's tokens are queued no more", "common", "'tokens', -f[2])", "'tokens', 0)")
async def _(w: World) -> None:
    await w.placed(tokens=7)
    assert await w.queued_tokens() == 0


@rules.rule("assigning dequeues", "assign", "dequeue(s)\n")
async def _(w: World) -> None:
    await w.placed(tokens=7)
    assert await w.queue() == [] and await w.queued_tokens() == 0


@rules.rule(
    "the Admit is sent in the same call",
    "assign",
    "if redis.call('XADD', P .. 'plan:' .. worker, 'NOMKSTREAM', '*', 'k', 'run', 't', term, 'm', admit) == false then",
    "if false then",
)
async def _(w: World) -> None:
    await w.placed()
    assert await w.stream("plan:w") == [[(b"k", b"run"), (b"t", b"1"), (b"m", b"admit")]]


@rules.rule("nothing is assigned to a worker that reads no more", "assign", "'NOMKSTREAM', ", "")
async def _(w: World) -> None:
    term = await w.worker()
    await w.admit("r")
    await w.redis.delete(w.key("plan:w"))
    before = await w.everything()
    assert await w.scripts.assign("r.0", 0, "w", term, b"admit") == "gone"
    assert await w.everything() == before


@rules.rule("assigning raises the epoch", "assign", "'epoch', epoch + 1)", "'epoch', epoch)")
async def _(w: World) -> None:
    await w.placed()
    record = await w.sequence()
    assert (record.state, record.epoch, record.worker) == ("placed", 1, "w")


@rules.rule("who runs on a worker is known", "assign", "redis.call('SADD', P .. 'on:' .. worker, sid)")
async def _(w: World) -> None:
    await w.placed("r", 2)
    assert await w.records.placed_on("w") == ["r.0", "r.1"]


LOST_REPLY = (
    "if f[1] == 'placed' and f[2] == tostring(epoch + 1) and f[3] == worker then return {'ok', ''} end -- a lost reply"
)


@rules.rule("an assign whose reply was lost is repeated", "assign", LOST_REPLY)
async def _(w: World) -> None:
    await w.placed()
    before = await w.everything()
    assert await w.scripts.assign("r.0", 0, "w", 1, b"admit") == "ok"
    assert await w.everything() == before


@rules.rule("a repeat is for the same worker", "assign", " and f[3] == worker then return {'ok'", " then return {'ok'")
async def _(w: World) -> None:
    await w.placed()
    term = await w.worker("w2")
    assert await w.scripts.assign("r.0", 0, "w2", term, b"admit") == "stale"
    assert await w.stream("plan:w2") == []


@rules.rule("a repeat is for the same epoch", "assign", " and f[2] == tostring(epoch + 1)", "")
async def _(w: World) -> None:
    await w.placed()
    await w.scripts.requeue("r.0", 1)
    assert await w.scripts.assign("r.0", 1, "w", 1, b"admit") == "ok"
    assert await w.scripts.assign("r.0", 0, "w", 1, b"admit") == "stale"
