"""Reading what the scripts wrote."""

from __future__ import annotations

import pytest

from shared.protocol import Outcome, TokenChunk
from shared.records import Reader
from shared.wire import ProtocolError, encode
from tests.shared.script_world import entry, spec_of, world_at


def chunk(first: int, *ids: int) -> bytes:
    return encode(TokenChunk(first=first, ids=ids))


async def test_a_request_comes_back(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.admit("r", 2, tokens=3)
        record = await w.records.request("r")
        assert record is not None
        assert (record.spec, record.prompt_ids, record.owner) == (spec_of("r", 2), [1, 1, 1], "key")
        assert (record.resume_ms, record.body_digest) == (0, "digest")
        assert await w.records.request("other") is None


async def test_a_sequence_comes_back(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed("r", tokens=4, priority=3)
        record = await w.sequence()
        assert (record.state, record.epoch, record.worker, record.gateway, record.attach) == ("placed", 1, "w", "g", 1)
        assert (record.num_tokens, record.strikes, record.num_prompt_tokens, record.outcome) == (0, 0, 4, b"")
        outcome = Outcome(reason="length")
        await w.scripts.finish("r.0", outcome)
        record = await w.sequence()
        assert (record.state, record.outcome) == ("done", encode(outcome))
        assert await w.records.sequence("r.1") is None


async def test_a_log_is_read_from_a_chunk_on(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed()
        await w.commit(entry(count=2, chunk=chunk(0, 5, 6)), entry(first=2, chunk=chunk(2, 7)))
        assert [c.ids for c in await w.records.log("r.0")] == [(5, 6), (7,)]
        assert [c.first for c in await w.records.log("r.0", first_chunk=1)] == [2]
        assert await w.records.log("r.0", first_chunk=2) == [] == await w.records.log("other.0")


async def test_what_is_not_ours_is_a_protocol_error(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed()
        await w.redis.hset(w.key("r:r"), "spec", b"garbage")
        await w.commit(entry(chunk=b"garbage"))
        with pytest.raises(ProtocolError):
            await w.records.request("r")
        with pytest.raises(ProtocolError):
            await w.records.log("r.0")


async def test_members_of_another_version_are_passed_over(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.gateway()
        await w.redis.hset(w.key("members"), "x", b"garbage")
        assert list(await w.records.members()) == ["g"]
        await w.redis.hdel(w.key("members"), "g")
        assert await w.records.members() == {}


async def test_who_is_placed_on_a_worker(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed("r", 3)
        assert await w.records.placed_on("w") == ["r.0", "r.1", "r.2"]
        assert await w.records.placed_on("other") == []


async def test_readers_of_sequences(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.placed("r", 2)
        await w.admit("q", gateway="g2", resume_ms=5)
        await w.scripts.finish("r.1", Outcome(reason="stop"))
        readers, now_ms = await w.records.readers(["r.0", "r.1", "q.0", "other.0"])
        assert readers == {"r.0": Reader("g", 1), "q.0": Reader("g2", 1, resume_ms=5)}
        await w.scripts.detach(["q.0"], 1, 5000)
        readers, later_ms = await w.records.readers(["q.0"])
        assert readers["q.0"].gateway == ""
        assert now_ms + 5000 <= readers["q.0"].orphan_at_ms <= later_ms + 5000


async def test_leases_that_are_alive(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        await w.gateway("g")
        await w.join("gateway", "g2")
        await w.redis.delete(w.key("lease:gateway:g2"))
        assert await w.records.alive("gateway", ["g", "g2", "g3"]) == {"g"}
        assert await w.records.alive("gateway", []) == set()


async def test_who_of_a_kind_is_alive(redis_url: str) -> None:
    async with world_at(redis_url) as w:
        for kind, id in (("store", "c"), ("store", "c2"), ("gateway", "g2")):
            await w.join(kind, id)
        await w.redis.hset(w.key("members"), "x", b"garbage")
        await w.redis.delete(w.key("lease:store:c2"))
        assert await w.records.living("store") == {"c"}
        assert await w.records.living("worker") == set()
