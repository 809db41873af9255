"""What holds for all scripts: reloading, keys, repeats, a full server, and the edges of what they answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ResponseError

from shared import bus
from shared.protocol import Event, Member, Outcome
from shared.scripts import Attached, CommitCode, Scripts, prefix_of
from shared.wire import encode
from tests.shared.script_world import CANCELLED, HOUR_MS, STOP, World, entry, spec_of, world_at

END = encode(STOP)
MAX_COMMIT_ENTRIES = 1024  # what a worker sends at most


async def whole_life(w: World) -> None:
    """Every script but `admit`, which a full server refuses: two requests are in the queue."""
    await w.gateway()
    await w.join("scheduler", "s", "inbox:s")
    term = await w.worker()
    assert await w.scripts.take_lease("run", "w", "s", HOUR_MS) == (term, "s")
    assert await w.scripts.plan("run", "w", term, [b"take over"], 1) == "ok"
    assert await w.scripts.assign("r.0", 0, "w", term, b"admit") == "ok"
    assert await w.scripts.assign("r.1", 0, "w", term, b"admit") == "ok"
    assert await w.scripts.refresh("worker", "w", HOUR_MS, {"plan:w": "0-1"})
    assert await w.scripts.send("inbox:s", b"reply")
    assert (await w.scripts.attach("r", "g2")).status == "ok"
    assert await w.commit(entry(count=2), entry("r.1"), report=b"report") == [(CommitCode.APPENDED, n) for n in (2, 1)]
    assert await w.scripts.requeue("r.0", 1, strikes=1)
    assert await w.scripts.assign("r.0", 1, "w", term, b"admit") == "ok"
    assert await w.commit(entry(epoch=2, first=2, outcome=END)) == [(CommitCode.APPENDED, 3)]
    assert await w.scripts.finish("r.1", STOP)
    assert await w.scripts.cancel_if(["q.0"], 1, CANCELLED) == 1
    assert await w.scripts.assign("q.1", 0, "w", term, b"admit") == "ok"
    assert await w.scripts.condemn("q.1", 1, Outcome(reason="error"), "why", 3)
    assert await w.scripts.drop_lease("run", "w", "s")
    await w.scripts.announce(Event(kind="run", id="w"))
    await w.scripts.gone("worker", "w")
    assert await w.scripts.bury("w")
    await w.scripts.gone("scheduler", "s")
    assert await w.scripts.forget_scheduler("s")


async def test_a_whole_life_on_a_full_server(any_redis_url: str) -> None:
    async with world_at(any_redis_url) as w:
        await w.admit("r", 2)
        await w.admit("q", 2)
        async with w.full_server():
            await whole_life(w)
        assert [(await w.sequence(sid)).state for sid in ("r.0", "r.1", "q.0", "q.1")] == ["done"] * 4


async def test_scripts_are_loaded_again_after_redis_has_forgotten_them(any_redis_url: str) -> None:
    async with world_at(any_redis_url) as w:
        await w.redis.script_flush()
        assert await w.scripts.take_lease("run", "w", "s", HOUR_MS) == (1, "s")
        await w.redis.script_flush()
        assert await w.scripts.take_lease("run", "w", "s", HOUR_MS) == (1, "s")


async def test_a_script_that_is_forgotten_as_soon_as_it_is_loaded(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_at(redis_url) as w:
        load = w.redis.script_load

        async def load_in_vain(source: str) -> str:
            sha: str = await load(source)
            await w.redis.script_flush()
            return sha

        await w.redis.script_flush()
        monkeypatch.setattr(w.redis, "script_load", load_in_vain)
        assert await w.scripts.take_lease("run", "w", "s", HOUR_MS) == (1, "s")


async def restricted(w: World, url: str, scripts: type[Scripts] = Scripts) -> None:
    """The whole life by a user who may touch only keys with the prefix."""
    await w.redis.execute_command("ACL", "SETUSER", "guest", "reset", "on", ">secret", "+@all", f"~{w.scripts.prefix}*")
    client = bus.connect(url)
    try:
        await client.execute_command("AUTH", "guest", "secret")
        guest = World(client, scripts(client, "m"))
        await guest.admit("r", 2)
        await guest.admit("q", 2)
        await whole_life(guest)
    finally:
        await client.aclose()
        await w.redis.execute_command("ACL", "DELUSER", "guest")


async def test_scripts_touch_only_keys_with_the_prefix(any_redis_url: str) -> None:
    async with world_at(any_redis_url) as w:
        await restricted(w, any_redis_url)
        keys = [k async for k in w.redis.scan_iter()]
        assert keys and all(k.startswith(b"hr1:{m}:") for k in keys)


async def test_a_script_that_touches_another_key_is_found(any_redis_url: str) -> None:
    class Stray(Scripts):
        def source(self, name: str) -> str:
            return super().source(name).replace("P .. 'term', kind", "'term', kind")

    async with world_at(any_redis_url) as w:
        with pytest.raises(ResponseError, match="can't access at least one of the keys"):
            await restricted(w, any_redis_url, Stray)


async def test_models_do_not_meet(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        other = World(w.redis, Scripts(w.redis, "other"))
        await w.placed()
        await other.admit("r")
        assert (await other.sequence()).state == "queued" and await other.records.members() == {}
    assert prefix_of("m") == "hr1:{m}:"


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.admit("r", 2),
        lambda w: w.scripts.assign("r.0", 0, "w", 1, b"admit"),
        lambda w: w.commit(entry(count=2)),
        lambda w: w.commit(entry("r.1", outcome=END)),
        lambda w: w.scripts.attach("r", "g2", 1),
        lambda w: w.scripts.detach(["r.0", "r.1"], 1, 1000),
        lambda w: w.scripts.requeue("r.0", 1, strikes=1),
        lambda w: w.scripts.finish("r.0", STOP),
        lambda w: w.scripts.cancel_if(["r.0", "r.1"], 1, CANCELLED),
        lambda w: w.scripts.condemn("r.0", 1, STOP, "why", 3),
        lambda w: w.scripts.plan("run", "w", 1, [b"x"], 5),
        lambda w: w.scripts.drop_lease("run", "w", "s"),
    ],
    ids=["admit", "assign", "commit", "commit an end", "attach", "detach", "requeue", "finish", "cancel", "condemn",
         "plan", "drop lease"],
)  # fmt: skip
async def test_a_repeated_call_changes_nothing(redis_url: str, call: Callable[[World], Awaitable[object]]) -> None:
    async with world_at(redis_url) as w:
        await w.placed("r", 2)
        await call(w)
        before = await w.everything()
        await call(w)
        assert await w.everything() == before


async def test_a_commit_of_the_largest_size(any_redis_url: str) -> None:
    async with world_at(any_redis_url) as w:
        await w.gateway()
        term = await w.worker()
        for i in range(0, MAX_COMMIT_ENTRIES, 128):
            rid = f"r{i}"
            await w.admit(rid, 128, max_requests=1 << 20, max_tokens=1 << 20)
            for choice in range(128):
                await w.scripts.assign(f"{rid}.{choice}", 0, "w", term, b"admit")
        sids = await w.records.placed_on("w")
        answers = await w.commit(*(entry(sid, outcome=END) for sid in sids))
        assert answers == [(CommitCode.APPENDED, 1)] * MAX_COMMIT_ENTRIES
        (fields,) = await w.stream("out:g")
        assert len(fields) == 2 * MAX_COMMIT_ENTRIES


async def test_a_request_that_has_ended_can_still_be_read(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed()
        await w.commit(entry(count=2, outcome=END))
        assert await w.scripts.attach("r", "g2") == Attached("ok", (("done", 2, 2),))
        assert await w.told("g") == [b"r.0", b"!r.0", b">r.0"]


async def test_two_chunks_of_one_sequence_in_one_commit(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed()
        answers = await w.commit(entry(count=2), entry(first=2, outcome=END), entry(first=3))
        assert answers == [(CommitCode.APPENDED, 2), (CommitCode.APPENDED, 3), (CommitCode.DONE, 3)]


async def test_binary_payloads_pass_through(redis_url: str) -> None:
    everything = bytes(range(256))
    async with world_at(redis_url) as w:
        await w.placed()
        await w.commit(entry(chunk=everything, outcome=END))
        assert await w.log() == [everything] and dict((await w.stream("out:g"))[0])[b"r.0"] == everything
        spec = spec_of("q", num_prompt_tokens=len(everything) // 4)
        await w.scripts.admit(
            [(spec, everything)], gateway="g", owner="", priority=0, max_requests=9, max_tokens=99, retention_ms=1
        )
        record = await w.records.request("q")
        assert record is not None and record.prompt == everything and record.spec == spec


async def test_nothing_can_be_attached_after_the_retention_time(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed(retention_ms=0)
        await w.commit(entry(outcome=END))
        assert await w.scripts.attach("r", "g2") == Attached("gone")
        assert await w.scripts.retry("r", spec_of("q"), 2, 1000) == "gone"
        assert await w.records.request("r") is None and await w.records.sequence("r.0") is None
        assert await w.commit(entry()) == [(CommitCode.DONE, 0)]
        assert not await w.scripts.requeue("r.0", 1) and not await w.scripts.finish("r.0", STOP)
        assert await w.scripts.assign("r.0", 0, "w", 1, b"admit") == "stale"


async def test_a_lease_says_whose_it_is(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.worker("w", "s")
        await w.scripts.take_lease("pool", "w", "c", HOUR_MS)
        await w.join("worker", "w2")
        assert await w.records.leases(["w", "w2"]) == {"w": ("s", "c", 1), "w2": ("", "", 0)}
        assert await w.records.leases([]) == {}


async def test_what_a_worker_announces_is_what_others_read(redis_url: str) -> None:
    member = Member(
        kind="worker", incarnation="w", max_model_len=512, num_blocks=64, block_size=16, max_num_seqs=8, variant="v"
    )
    async with world_at(redis_url) as w:
        await w.scripts.join(member, HOUR_MS, [])
        assert await w.records.members() == {"w": (member, True)}
        await w.redis.delete(w.key("lease:worker:w"))
        assert await w.records.members() == {"w": (member, False)}
