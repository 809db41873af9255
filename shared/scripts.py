"""Every change of shared state: one typed async function a Lua script (`shared/lua/`), run atomically by Redis.

All scripts may be repeated: a caller that lost the reply calls again and learns what holds now. They declare one key,
the model's prefix, and build the rest from it. Sent as EVALSHA and reloaded on NOSCRIPT, which comes after every
restart of Redis. Reading is in `shared/records.py`. Payloads pass through as opaque bytes; ids, epochs, terms and
counts are separate arguments. Knows nothing of what payloads mean, except `Outcome` and `Event`, which it encodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError

from shared import crash_points
from shared.protocol import Event, Member, Outcome, RequestSpec, TokenChunk
from shared.wire import MAJOR, encode

SCHEDULER_GROUP = "schedulers"
STREAM_TTL_MS = 60_000  # a point-to-point stream outlives its reader by this much

Arg = str | bytes | int


class CommitCode(IntEnum):
    APPENDED = 0
    HAVE = 1  # the log already reaches the end of the chunk: a repeat
    FROM = 2  # the log ends elsewhere: cut the next chunk at the returned length
    STALE = 3  # another epoch owns the sequence: drop it
    DONE = 4  # a terminal state: drop it


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """One sequence in a commit; outcome (encoded) ends it after this chunk. In prefill: count 0, chunk empty."""

    sid: str
    epoch: int
    first: int
    count: int
    chunk: bytes = b""
    outcome: bytes = b""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one API key may do, over all gateways; 0: as much as there is room for.

    A minute's worth is a bucket that refills evenly. Tokens are those of prompts, taken at admission, and those drawn,
    taken when the request ends: so a key may go into debt, and waits until that is paid.
    """

    concurrency: int = 0  # requests open at a time
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


UNLIMITED = KeyLimits()


@dataclass(frozen=True, slots=True)
class Repeat:
    """By what a call is known to be the same as an earlier one; key empty: by nothing."""

    key: str = ""
    body_digest: str = ""


NO_REPEAT = Repeat()


@dataclass(frozen=True, slots=True)
class Admission:
    """status: ok, exists (both: accepted), full_requests, full_tokens (the queue), key_open, key_requests, key_tokens
    (the key's limits). number: what the status is about; of ok the sequences that are queued now."""

    status: str
    number: int
    wait_ms: int = 0  # after which the key's minute has room for this request
    num_left: int = 0  # sequences that have ever left the queue
    requests_left: int = 0  # of the key's minute
    requests_reset_ms: int = 0  # until all of it is left
    tokens_left: int = 0
    tokens_reset_ms: int = 0
    rid: str = ""  # of the call that was admitted: where it exists, maybe another's with this repeat key
    key_limits: KeyLimits = UNLIMITED  # that were asked about

    @property
    def accepted(self) -> bool:
        return self.status in ("ok", "exists")


@dataclass(frozen=True, slots=True)
class RestoredChoice:
    """outcome None: it goes on after these tokens."""

    chunks: tuple[TokenChunk, ...]
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class Attached:
    """status: ok, lost (a newer attach exists), gone (no record). One (state, attach number, log length) a choice."""

    status: str
    choices: tuple[tuple[str, int, int], ...] = ()


def prefix_of(model: str) -> str:
    """The prefix of all keys of a served model; one hash tag, so that they share a slot."""
    return f"hr{MAJOR}:{{{model}}}:"


class Scripts:
    """The scripts of one model on one connection pool."""

    def __init__(self, redis: Redis, model: str) -> None:
        self.redis = redis
        self.prefix = prefix_of(model)
        self._scripts: dict[str, AsyncScript] = {}

    def key(self, name: str) -> str:
        return self.prefix + name

    def source(self, name: str) -> str:
        """The Lua text of a script with its prelude."""
        lua = files("shared") / "lua"
        return (lua / "common.lua").read_text() + (lua / f"{name}.lua").read_text()

    async def _run(self, name: str, *args: Arg) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(self.source(name))
        crash_points.reached("before", name)
        try:
            reply = await script(keys=[self.prefix], args=args)
        except NoScriptError:  # Redis was restarted once more between its loading and its call
            reply = await self.redis.eval(self.source(name), 1, self.prefix, *args)
        crash_points.reached("after", name)
        return reply

    # --- requests ------------------------------------------------------------------------------------------------

    async def admit(
        self, requests: Sequence[tuple[RequestSpec, bytes]], *, gateway: str, owner: str, priority: int,
        max_requests: int, max_tokens: int, retention_ms: int, key_limits: KeyLimits = UNLIMITED, resume_ms: int = 0,
        repeat: Repeat = NO_REPEAT,
    ) -> Admission:  # fmt: skip
        """requests: those of one call with their packed prompts; all are admitted, or none. The time limits are the
        first one's. owner: the API key's id, to which the key limits apply. resume_ms: how long they go on when their
        client has left. repeat: by what others that repeat the call find it.
        """
        limits = requests[0][0].time_limits
        fields: dict[str, Arg] = {"retention_ms": retention_ms, "body_digest": repeat.body_digest}
        args: list[Arg] = [max_requests, max_tokens, gateway, priority, resume_ms, owner]
        args += [key_limits.concurrency, key_limits.requests_per_minute, key_limits.tokens_per_minute]
        args += [limits.queue_ms, limits.first_token_ms, limits.total_ms, repeat.key, len(fields)]
        args += [arg for field in fields.items() for arg in field]
        for spec, prompt in requests:
            args += (spec.rid, spec.num_choices, spec.num_prompt_tokens, prompt, encode(spec), spec.log_start)
        status, *numbers, rid = await self._run("admit", *args)
        return replace(Admission(status.decode(), *numbers), rid=rid.decode(), key_limits=key_limits)

    async def assign(self, sid: str, epoch: int, worker: str, term: int, admit: bytes) -> str:
        """ok | stale (not queued at that epoch) | fenced (term is not current) | gone (the worker reads no more)."""
        status, _ = await self._run("assign", sid, epoch, worker, term, admit)
        return str(status.decode())

    async def commit(
        self, worker: str, lease_ms: int, inbox: str, report: bytes, entries: Sequence[CommitEntry]
    ) -> list[tuple[CommitCode, int]] | None:
        """One (code, log length) an entry; None: the worker's lease has lapsed and nothing was done."""
        args: list[Arg] = [worker, lease_ms, inbox, report]
        for e in entries:
            args += (e.sid, e.epoch, e.first, e.count, e.chunk, e.outcome)
        reply = await self._run("commit", *args)
        if reply[0] != b"ok":
            return None
        return [(CommitCode(code), length) for code, length in reply[1:]]

    async def finish(self, sid: str, outcome: Outcome, epoch: int | None = None) -> bool:
        """True if this call ended it. Without an epoch: whatever place it has."""
        return bool(await self._run("finish", sid, "" if epoch is None else epoch, encode(outcome)))

    async def cancel_if(self, sids: Sequence[str], attach: int, outcome: Outcome) -> int:
        """Ends those sequences of a request whose attach number is still this one; how many. Several: all open ones."""
        cancelled = sids[0] if len(sids) == 1 else sids[0].rpartition(".")[0]
        event = encode(Event(kind="cancelled", id=cancelled))
        return int(await self._run("cancel_if", attach, encode(outcome), event, *sids))

    async def detach(self, sids: Sequence[str], attach: int, wait_ms: int) -> int:
        """Their client has left and may come back: a scheduler cancels those that nobody reads after wait_ms. How many
        still had this attach number."""
        return int(await self._run("detach", attach, wait_ms, *sids))

    async def open_queue(self) -> None:
        """Makes the queue's group, which is there already unless Redis has lost it."""
        await self._run("open_queue")

    async def condemn(self, sid: str, epoch: int, outcome: Outcome, reason: str, deaths: int) -> bool:
        """Ends a sequence that workers die of, and keeps it for people in the stream `dead`."""
        return bool(await self._run("condemn", sid, epoch, encode(outcome), reason, deaths))

    async def keep_dead(self, sid: str, reason: str) -> bool:
        """Keeps one there that has ended by an error of its own; False if it is there already."""
        return bool(await self._run("keep_dead", sid, reason))

    async def retry(self, rid: str, spec: RequestSpec, strikes: int, resume_ms: int) -> str:
        """ok | exists | gone. Runs a request again as spec.rid, which nobody reads, for at most resume_ms."""
        return str((await self._run("retry", rid, spec.rid, encode(spec), strikes, resume_ms, spec.log_start)).decode())

    async def restore(
        self, spec: RequestSpec, prompt: bytes, choices: Sequence[RestoredChoice], *, gateway: str, attach: int,
        owner: str, resume_ms: int, retention_ms: int, repeat: Repeat,
    ) -> bool:  # fmt: skip
        """Puts back a request that Redis has forgotten, as its gateway has it; False if it is there."""
        args: list[Arg] = [spec.rid, gateway, attach, owner, resume_ms, retention_ms, repeat.body_digest, spec.priority]
        args += [spec.time_limits.total_ms, spec.num_prompt_tokens, prompt, encode(spec), len(choices), repeat.key]
        for choice in choices:
            outcome = encode(choice.outcome) if choice.outcome is not None else b""
            args += [outcome, spec.log_start + sum(len(chunk.ids) for chunk in choice.chunks), len(choice.chunks)]
            args += [encode(chunk) for chunk in choice.chunks]
        return bool(await self._run("restore", *args))

    async def free_key(self, repeat_key: str, rid: str) -> bool:
        """A call that failed gives up the key by which others repeat it; False if another call has it by now."""
        return bool(await self._run("free_key", repeat_key, rid))

    async def offer(self, sid: str, epoch: int, scheduler: str) -> str:
        """ok | stale (not queued at that epoch) | offered (was, in it) | gone (that scheduler reads no more)."""
        return str((await self._run("offer", sid, epoch, scheduler)).decode())

    async def requeue(self, sid: str, epoch: int, strikes: int = 0) -> bool:
        return bool(await self._run("requeue", sid, epoch, strikes))

    async def attach(self, rid: str, gateway: str, number: int | None = None) -> Attached:
        """Without a number it is a client's attach, which wins; with one, a gateway re-attaching by itself."""
        reply = await self._run("attach", rid, gateway, "" if number is None else number)
        rest = reply[2:]
        choices = tuple((rest[i].decode(), rest[i + 1], rest[i + 2]) for i in range(0, len(rest), 3))
        return Attached(reply[0].decode(), choices)

    # --- messages --------------------------------------------------------------------------------------------------

    async def send(self, stream: str, *messages: bytes) -> bool:
        """Appends to a stream that one incarnation reads; False if it does not any more. Also on a full server."""
        return bool(await self._run("send", stream, *messages))

    async def announce(self, event: Event) -> None:
        """A hint for all services."""
        await self._run("announce", encode(event))

    # --- leases and membership -------------------------------------------------------------------------------------

    async def take_lease(self, kind: str, id: str, owner: str, lease_ms: int) -> tuple[int, str]:
        """(term, owner); term 0 when another holds it. kind: run (scheduler on worker) or pool (store on pool)."""
        term, holder = await self._run("take_lease", kind, id, owner, lease_ms)
        return term, holder.decode()

    async def drop_lease(self, kind: str, id: str, owner: str) -> bool:
        return bool(await self._run("drop_lease", kind, id, owner))

    async def plan(self, kind: str, worker: str, term: int, changes: Sequence[bytes], number: int | None = None) -> str:
        """ok | fenced | gone. With numbers that rise from call to call of a term, a repeat adds nothing."""
        status, _ = await self._run("plan", kind, worker, term, "" if number is None else number, *changes)
        return str(status.decode())

    async def join(self, member: Member, lease_ms: int, streams: Sequence[str]) -> list[str]:
        """Announces an incarnation and makes its streams; the ids after which to read them."""
        event = encode(Event(kind="joined", id=member.incarnation))
        told: list[Arg] = [lease_ms, STREAM_TTL_MS, encode(member), event, *streams]
        return [i.decode() for i in await self._run("join", member.kind, member.incarnation, *told)]

    async def amend(self, member: Member) -> bool:
        """A living incarnation announces itself anew; False if it is dead."""
        event = encode(Event(kind="joined", id=member.incarnation))
        return bool(await self._run("amend", member.kind, member.incarnation, encode(member), event))

    async def refresh(self, kind: str, id: str, lease_ms: int, handled: dict[str, str]) -> list[str] | None:
        """The last id of each stream ('' if gone); None: the lease has lapsed. Trims up to the handled ids."""
        names_and_ids = [part for pair in handled.items() for part in pair]
        reply = await self._run("refresh", kind, id, lease_ms, STREAM_TTL_MS, *names_and_ids)
        return None if reply[0] != b"ok" else [i.decode() for i in reply[1:]]

    async def gone(self, kind: str, incarnation: str) -> None:
        await self._run("gone", kind, incarnation, encode(Event(kind="left", id=incarnation)))

    async def bury(self, worker: str) -> bool:
        """Forgets a dead worker; False while sequences are placed there, or it is alive."""
        return bool(await self._run("bury", worker))

    async def forget_scheduler(self, scheduler: str) -> bool:
        """Forgets a dead scheduler; False while it holds entries of the queue, or it is alive."""
        return bool(await self._run("forget_scheduler", scheduler))
