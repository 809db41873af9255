"""An incarnation's own life in Redis: it joins, refreshes its lease, learns that it has lapsed, and leaves.

Owns how long leases last. Does not own the leases with terms (scheduler on worker, store on pool): those are taken by
`Scripts.take_lease` where they are used. A lease is a hint about liveness; correctness rests on terms and epochs.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from shared.bus import id_key
from shared.protocol import Member, MemberKind
from shared.scripts import Scripts

BUSY_LEASE_MS = 800  # a worker with work: refreshed by every commit and at least every 250 ms
BUSY_REFRESH_MS = 250
IDLE_LEASE_MS = 6000
IDLE_REFRESH_MS = 2000


class Lapsed(Exception):
    """The lease ended before it was refreshed: others may have acted on that, so this life is over."""


class StreamLost(Exception):
    """A stream that this process reads is gone or is not the one it was: what it said must be read from state."""


def new_incarnation(kind: MemberKind) -> str:
    return f"{kind[0] if kind != 'store' else 'c'}-{secrets.token_hex(6)}"


class Membership:
    """One incarnation. `streams` are those that only it reads, named without the prefix."""

    def __init__(self, scripts: Scripts, member: Member, streams: list[str]) -> None:
        self.scripts = scripts
        self.member = member
        self.streams = streams

    @property
    def incarnation(self) -> str:
        return self.member.incarnation

    async def join(self, lease_ms: int = IDLE_LEASE_MS) -> dict[str, str]:
        """Announces it and makes its streams; the id after which to read each."""
        ids = await self.scripts.join(self.member, lease_ms, self.streams)
        return dict(zip(self.streams, ids, strict=True))

    async def refresh(self, handled: Mapping[str, str], lease_ms: int = IDLE_LEASE_MS) -> None:
        """handled: the last id of each own stream that was handled; the stream is trimmed up to it.

        Lapsed or StreamLost when this incarnation, or what it has read, is no longer valid.
        """
        own = {name: handled[name] for name in self.streams}
        last = await self.scripts.refresh(self.member.kind, self.incarnation, lease_ms, own)
        if last is None:
            raise Lapsed(self.incarnation)
        for name, last_id in zip(self.streams, last, strict=True):
            if last_id == "" or id_key(last_id) < id_key(own[name]):
                raise StreamLost(name)

    async def amend(self, **fields: object) -> None:
        """Says something else of itself, if it is alive."""
        self.member = self.member.model_copy(update=fields)
        await self.scripts.amend(self.member)

    async def leave(self) -> None:
        await self.scripts.gone(self.member.kind, self.incarnation)
