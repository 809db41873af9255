"""Services of another version share a Redis: what they say more is ignored, and what is theirs alone is left alone."""

from __future__ import annotations

import msgpack

from shared.protocol import Event, Member
from shared.wire import encode
from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import SLOW, mixed
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until

NOT_OURS = [
    "a plan change is not ours, left out", "a queue entry is not ours, left alone", "undecodable message",
    "unknown field", "not understood",
]  # fmt: skip


def newer(message: Event | Member) -> bytes:
    """As a later version of the same major would write it."""
    name, fields = msgpack.unpackb(encode(message))
    data: bytes = msgpack.packb([name, fields | {"from_a_newer_one": [1, {"a": b"b"}]}])
    return data


def speak_newer(stack: Stack) -> None:
    """Every stream gets what its reader does not know, and what it knows with more in it."""
    redis, key = stack.state.redis, stack.state.key
    unknown = msgpack.packb(["from_a_newer_one", {"a": 1}])
    streams = {"worker": "plan", "scheduler": "inbox", "store": "cache", "gateway": "out"}
    for incarnation, member in stack.state.members().items():
        redis.hset(key("members"), incarnation, newer(member))
        stream = key(f"{streams[member.kind]}:{incarnation}")
        if member.kind == "gateway":
            redis.xadd(stream, {"m": unknown, "~from a newer one": b"x"})
        else:
            redis.xadd(stream, {"k": "run", "t": 10**6, "m": unknown, "more": "x"})
            redis.xadd(stream, {"more": "x"})
    redis.xadd(key("events"), {"m": newer(Event(kind="joined", id="x")), "more": "x"})
    redis.xadd(key("events"), {"m": unknown})
    redis.xadd(key("events"), {"more": "x"})


def speak_another_major(stack: Stack) -> dict[bytes, bytes]:
    """Its keys lie beside ours, under the same names; what was in them."""
    prefix = stack.state.prefix.replace("hr1:", "hr2:", 1)
    redis = stack.state.redis
    redis.hset(prefix + "members", "w-2", b"\xff")
    redis.xadd(prefix + "requests", {"sid": "r.0", "what": "else"})
    redis.xadd(prefix + "events", {"m": b"\xff"})
    return {name: redis.dump(name) for name in redis.keys(prefix.replace("{", "[{]").replace("}", "[}]") + "*")}


async def test_what_another_version_says_changes_nothing(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    async with new_stack(workers=2, gateways=2, env=SLOW) as stack:
        stack.allowed += NOT_OURS
        theirs = speak_another_major(stack)
        client = connect(stack.url)
        answering = client.begin_all(mixed("load"))
        await wait_until(lambda: len(stack.state.running()) > 10)
        speak_newer(stack)
        stack.state.redis.hset(stack.state.key("members"), "w-unreadable", b"\xff")
        foreign = stack.state.redis.xadd(stack.state.key("requests"), {"what": "another version queues"})
        check_same(await answering, undisturbed)
        note(pause_s=longest_pause_s(await answering))
        check_same(await client.ask_all(mixed("load")), undisturbed)
        assert stack.state.redis.xrange(stack.state.key("requests"), foreign, foreign), "it is for somebody else"
        for name, data in theirs.items():
            assert stack.state.redis.dump(name) == data, name
        stack.state.redis.xack(stack.state.key("requests"), "schedulers", foreign)
        stack.state.redis.xdel(stack.state.key("requests"), foreign)
        stack.state.redis.hdel(stack.state.key("members"), "w-unreadable")
        stack.state.redis.delete(*theirs)
