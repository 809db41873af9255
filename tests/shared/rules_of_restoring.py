"""Rules of `restore`: a request that Redis has forgotten is there again as its gateway had it."""

from __future__ import annotations

from shared.protocol import Outcome, TokenChunk
from shared.scripts import NO_REPEAT, CommitCode, Repeat, RestoredChoice
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import HOUR_MS, World, entry, spec_of

rules = RuleBook()
ENDED = RestoredChoice((TokenChunk(first=0, ids=(7,)),), Outcome(reason="stop", num_tokens=1))
OPEN = RestoredChoice((TokenChunk(first=0, ids=(1, 2)), TokenChunk(first=2, ids=(3,))), None)


async def restore(w: World, *choices: RestoredChoice, repeat: Repeat = NO_REPEAT) -> bool:
    return await w.scripts.restore(
        spec_of("r", len(choices)), b"\1\0\0\0" * 3, choices, gateway="g", attach=4, owner="key", resume_ms=0,
        retention_ms=HOUR_MS, repeat=repeat,
    )  # fmt: skip


@rules.rule("restore leaves alone what is there", "restore", "if redis.call('EXISTS', r) == 1 then return 0 end")
async def _(w: World) -> None:
    await w.placed()
    await w.commit(entry(count=2))
    assert not await restore(w, OPEN)
    assert (await w.sequence()).state == "placed" and (await w.sequence()).num_tokens == 2


@rules.rule(
    "restore brings back the tokens",
    "restore",
    "for c = 1, num_chunks do redis.call('RPUSH', s .. ':log', ARGV[at + 2 + c]) end",
)
async def _(w: World) -> None:
    await w.gateway()
    assert await restore(w, OPEN)
    assert [c.ids for c in await w.records.log("r.0")] == [(1, 2), (3,)]


@rules.rule(
    "restore brings back the repeat key",
    "restore",
    "name_for_repeats(rid, ARGV[14])",
)
async def _(w: World) -> None:
    await w.gateway()
    assert await restore(w, OPEN, repeat=Repeat("key", "digest"))
    assert (await w.ask_admission("q", repeat=Repeat("key", "digest"))).rid == "r"


@rules.rule("restore queues what goes on", "restore", "enqueue(sid, s, 0)")
async def _(w: World) -> None:
    await w.gateway()
    await w.worker()
    assert await restore(w, ENDED, OPEN)
    assert await w.scripts.assign("r.1", 0, "w", 1, b"admit") == "ok"
    assert await w.commit(entry("r.1", first=3, count=1)) == [(CommitCode.APPENDED, 4)]


@rules.rule("restore leaves ended what has ended", "restore", "settle(sid, s, outcome)", "enqueue(sid, s, 0)")
async def _(w: World) -> None:
    await w.gateway()
    assert await restore(w, ENDED, OPEN)
    assert (await w.sequence("r.0")).state == "done"


@rules.rule("restore keeps the attach number", "restore", "'attach', attach,", "'attach', 1,")
async def _(w: World) -> None:
    await w.gateway()
    assert await restore(w, OPEN)
    assert (await w.sequence()).attach == 4 and (await w.sequence()).gateway == "g"


@rules.rule("restore keeps the priority", "restore", "'priority', ARGV[8]", "'priority', 0")
async def _(w: World) -> None:
    await w.gateway()
    spec = spec_of("r").model_copy(update={"priority": -7})
    assert await w.scripts.restore(
        spec, b"\1\0\0\0" * 3, [OPEN], gateway="g", attach=4, owner="key", resume_ms=0, retention_ms=HOUR_MS,
        repeat=NO_REPEAT,
    )  # fmt: skip
    assert (await w.sequence()).priority == -7
