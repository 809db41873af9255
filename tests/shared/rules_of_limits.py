"""Rules of what one API key may have, of deadlines, and of what a queue entry says of both."""

from __future__ import annotations

from typing import Any

from shared.scripts import Admission, KeyLimits
from shared.wire import encode
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import CANCELLED, STOP, World, entry

rules = RuleBook()
ONE_OPEN = KeyLimits(concurrency=1)


async def ask(w: World, rid: str, limits: KeyLimits, tokens: int = 3, **options: Any) -> Admission:
    return await w.ask_admission(rid, 1, tokens, key_limits=limits, **options)


async def header(w: World) -> dict[bytes, bytes]:
    return dict((await w.stream("requests"))[-1])


async def redis_ms(w: World) -> int:
    seconds, us = await w.redis.time()
    return int(seconds) * 1000 + int(us) // 1000


@rules.rule(
    "a key's open requests are bounded",
    "admit",
    "if max_open > 0 and open > 0 and open + num_prompts > max_open then return answer('key_open', max_open) end",
)
async def _(w: World) -> None:
    assert (await ask(w, "a", ONE_OPEN)).status == "ok"
    before = await w.everything()
    refused = await ask(w, "b", ONE_OPEN)
    assert (refused.status, refused.number, refused.accepted) == ("key_open", 1, False)
    assert await w.everything() == before
    assert (await ask(w, "a", ONE_OPEN)).status == "exists"
    assert (await ask(w, "c", ONE_OPEN, owner="another")).status == "ok"


@rules.rule("one call may have more prompts than a key may have open", "admit", "and open > 0 and open +", "and open +")
async def _(w: World) -> None:
    assert (await ask(w, "a", ONE_OPEN, more=[("a-1", 1, 3)])).status == "ok"
    assert (await ask(w, "b", KeyLimits(concurrency=2))).status == "key_open"
    assert (await ask(w, "c", KeyLimits(concurrency=3))).status == "ok"


@rules.rule("a request that has ended is open no more", "common", "redis.call('SREM', P .. 'open:' .. f[2], rid)")
async def _(w: World) -> None:
    await w.gateway()
    term = await w.worker()
    for rid in ("a", "b", "c"):
        assert (await w.ask_admission(rid, 2, key_limits=ONE_OPEN)).status == "ok", rid
        await w.scripts.assign(f"{rid}.0", 0, "w", term, b"admit")
        await w.commit(entry(f"{rid}.0", outcome=encode(STOP)))
        assert (await w.ask_admission("d", key_limits=ONE_OPEN)).status == "key_open", "one of its choices goes on"
        await w.scripts.cancel_if([f"{rid}.1"], 1, CANCELLED)
    assert not await w.exists("open:key")


@rules.rule(
    "a key's requests a minute are bounded",
    "admit",
    "if wait_ms > 0 then return answer('key_requests', per_minute.requests, wait_ms) end",
)
async def _(w: World) -> None:
    limits = KeyLimits(requests_per_minute=3)
    left = [await ask(w, rid, limits) for rid in "abc"]
    assert [(a.status, a.requests_left) for a in left] == [("ok", 2), ("ok", 1), ("ok", 0)]
    assert 19_000 < left[0].requests_reset_ms <= 20_000 and 59_000 < left[2].requests_reset_ms <= 60_000
    before = await w.everything()
    refused = await ask(w, "d", limits)
    assert refused.status == "key_requests" and 19_000 < refused.wait_ms <= 20_000
    assert await w.everything() == before
    assert (await ask(w, "e", limits, owner="another")).status == "ok"


@rules.rule("a key's minute refills evenly", "common", "math.max(now, tonumber(", "math.max(now, 60000 + tonumber(")
async def _(w: World) -> None:
    limits = KeyLimits(requests_per_minute=60_000)  # one a millisecond
    first = await ask(w, "a", limits)
    start = await redis_ms(w)
    while await redis_ms(w) < start + 2:
        pass
    assert first.requests_left == 59_999 and (await ask(w, "b", limits)).requests_left == 59_999


@rules.rule(
    "a key's minute is kept only until it is full again", "common", "redis.call('PEXPIRE', rate, ttl)", "local _"
)
async def _(w: World) -> None:
    await ask(w, "a", KeyLimits(requests_per_minute=3, tokens_per_minute=60))
    assert 19_000 < await w.redis.pttl(w.key("rate:key")) <= 20_000
    await ask(w, "b", KeyLimits(requests_per_minute=3))
    assert 39_000 < await w.redis.pttl(w.key("rate:key")) <= 40_000


@rules.rule(
    "a key's tokens a minute are bounded",
    "admit",
    "if wait_ms > 0 then return answer('key_tokens', per_minute.tokens, wait_ms) end",
)
async def _(w: World) -> None:
    limits = KeyLimits(tokens_per_minute=100)
    assert (await ask(w, "a", limits, tokens=60)).tokens_left == 40
    refused = await ask(w, "b", limits, tokens=50)
    assert refused.status == "key_tokens" and 5_000 < refused.wait_ms <= 6_000 and refused.tokens_left == 40
    assert (await ask(w, "c", limits, tokens=10, more=[("c-1", 2, 20)])).tokens_left == 10


@rules.rule(
    "a prompt that is larger than a minute takes a full one",
    "admit",
    "math.min(prompt_tokens, per_minute.tokens)",
    "prompt_tokens",
)
async def _(w: World) -> None:
    limits = KeyLimits(tokens_per_minute=100)
    big = await ask(w, "a", limits, tokens=300)
    assert (big.status, big.tokens_left) == ("ok", 0) and 179_000 < big.tokens_reset_ms <= 180_000
    assert 120_000 < (await ask(w, "b", limits, tokens=1)).wait_ms <= 121_000


@rules.rule(
    "tokens that were drawn are taken when the request ends",
    "common",
    "if num_tokens > 0 then take_from_bucket(f[2], 'tokens', now_ms(), num_tokens * f[3]) end",
)
async def _(w: World) -> None:
    limits = KeyLimits(tokens_per_minute=100)
    await w.placed("r", 2, tokens=10, key_limits=limits)
    await w.commit(entry("r.0", count=30), entry("r.1", count=20))
    await w.scripts.finish("r.0", STOP)
    assert (await ask(w, "b", limits, tokens=10)).tokens_left == 80
    await w.scripts.finish("r.1", STOP)
    assert (await ask(w, "c", limits, tokens=1)).tokens_left == 29


# --- deadlines -------------------------------------------------------------------------------------------------------


@rules.rule("deadlines are in Redis' time", "admit", "return ms > 0 and now + ms or 0 end", "return ms end")
async def _(w: World) -> None:
    before = await redis_ms(w)
    await w.admit(time_limits={"queue_ms": 1000, "first_token_ms": 2000, "total_ms": 3000})
    fields, after = await header(w), await redis_ms(w)
    for name, ms in ((b"start_by", 1000), (b"first_by", 2000), (b"end_by", 3000)):
        assert before + ms <= int(fields[name]) <= after + ms
    deadlines = await w.records.deadlines("r")
    assert (deadlines.owner, deadlines.first_by_ms) == ("key", int(fields[b"first_by"]))
    assert deadlines.end_by_ms == int(fields[b"end_by"])


@rules.rule("a time limit of 0 is none", "admit", "return ms > 0 and now + ms or 0 end", "return now + ms end")
async def _(w: World) -> None:
    await w.admit()
    assert {(await header(w))[name] for name in (b"start_by", b"first_by", b"end_by")} == {b"0"}


@rules.rule("a queue entry names its key", "common", "'key', d[1] or ''", "'key', ''")
async def _(w: World) -> None:
    await w.admit()
    assert (await header(w))[b"key"] == b"key"


@rules.rule("what was placed once has no time to start by", "common", "tonumber(epoch) == 0 and d[2] or 0", "d[2]")
async def _(w: World) -> None:
    await w.placed(time_limits={"queue_ms": 1000, "first_token_ms": 2000, "total_ms": 3000})
    await w.scripts.requeue("r.0", 1)
    fields = await header(w)
    assert fields[b"start_by"] == b"0" and fields[b"first_by"] != b"0" and fields[b"end_by"] != b"0"


@rules.rule("what has a token has no time for the first one", "common", "tonumber(f[2]) <= 0 and d[3] or 0", "d[3]")
async def _(w: World) -> None:
    await w.placed(time_limits={"first_token_ms": 2000, "total_ms": 3000})
    await w.commit(entry())
    await w.scripts.requeue("r.0", 1)
    fields = await header(w)
    assert fields[b"first_by"] == b"0" and fields[b"end_by"] != b"0"


@rules.rule("what leaves the queue is counted", "common", "redis.call('HINCRBY', P .. 'queue', 'left', 1)")
async def _(w: World) -> None:
    await w.gateway()
    term = await w.worker()
    assert (await w.ask_admission("a", 3)).num_left == 0
    await w.scripts.assign("a.0", 0, "w", term, b"admit")
    await w.scripts.finish("a.1", STOP)
    assert (await w.ask_admission("b")).num_left == 2
