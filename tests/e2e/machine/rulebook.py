"""What each script may do to the sequences that it names, stated a second time, from the design and not from the Lua.

`before` looks at the records that a script names when it is about to run and returns what looks again afterwards:
AssertionError when a record has changed in a way that the rules do not allow, or has not changed though it must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import redis

Words = tuple[Any, ...]
Check = Callable[[Any], None]
FIELDS = ("state", "epoch", "worker", "gateway", "attach", "num_tokens", "outcome")
ADMIT_ROW = 6
COMMIT_ROW = 6


@dataclass(frozen=True)
class Seen:
    """A sequence's record; state "" where there is none."""

    state: str = ""
    epoch: int = 0
    worker: str = ""
    gateway: str = ""
    attach: int = 0
    num_tokens: int = 0
    outcome: bytes = b""

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "placed")


class Rulebook:
    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._redis = client
        self._prefix = prefix
        self._rules: dict[str, Callable[[Words], Check]] = {
            "admit": self._admit, "commit": self._commit, "assign": self._assign, "finish": self._finish,
            "condemn": self._condemn,
            "cancel_if": self._cancel_if, "requeue": self._requeue, "attach": self._attach, "plan": self._plan,
            "detach": self._detach,
            "take_lease": self._take_lease,
        }  # fmt: skip

    def before(self, script: str, words: Words) -> Check:
        rule = self._rules.get(script)
        return rule(words) if rule else lambda reply: None

    # --- looking -----------------------------------------------------------------------------------------------------

    def _see(self, sid: str) -> Seen:
        values = self._redis.hmget(f"{self._prefix}s:{sid}", FIELDS)
        if values[0] is None:
            return Seen()
        state, epoch, worker, gateway, attach, num_tokens, outcome = (v or b"" for v in values)
        return Seen(
            state.decode(), int(epoch), worker.decode(), gateway.decode(), int(attach), int(num_tokens), outcome
        )

    def _expect(self, sid: str, before: Seen, **changes: Any) -> None:
        wanted, found = replace(before, **changes), self._see(sid)
        assert found == wanted, f"{sid}: {found}, allowed is {wanted}"

    def _term(self, kind: str, worker: str) -> int:
        return int(self._redis.hget(f"{self._prefix}term", f"{kind}:{worker}") or 0)

    def _has_lease(self, kind: str, id: str) -> bytes | None:
        return self._redis.get(f"{self._prefix}lease:{kind}:{id}")

    # --- rules -------------------------------------------------------------------------------------------------------

    def _admit(self, words: Words) -> Check:
        """All choices or none, once."""
        num_fields, prompts = int(words[13]), words[14 + 2 * int(words[13]) :]
        rid, num_choices = prompts[:2]
        assert len(prompts) == ADMIT_ROW and num_fields, "a call of one prompt"
        sids = [f"{rid}.{i}" for i in range(num_choices)]
        seen = [self._see(sid) for sid in sids]
        new = Seen("queued", 0, "", words[2], 1)

        def check(reply: Any) -> None:
            status = reply[0].decode()
            assert (status == "exists") == (seen[0] != Seen()), f"{rid}: {status}"
            for sid, before in zip(sids, seen, strict=True):
                self._expect(sid, new if status == "ok" else before)

        return check

    def _commit(self, words: Words) -> Check:
        """Tokens are taken from the sequence's own place alone, at the end of its log; so is its end."""
        leased = self._has_lease("worker", words[0]) is not None
        rows = [words[i : i + COMMIT_ROW] for i in range(4, len(words), COMMIT_ROW)]
        seen = [self._see(row[0]) for row in rows]

        def check(reply: Any) -> None:
            for (sid, epoch, first, count, _, outcome), before in zip(rows, seen, strict=True):
                first, count, changes = int(first), int(count), dict[str, Any]()
                if leased and before.state == "placed" and before.epoch == int(epoch):
                    length = before.num_tokens
                    if first == length:
                        length = changes["num_tokens"] = first + count
                    if outcome and first + count == length:
                        changes |= {"state": "done", "outcome": outcome}
                self._expect(sid, before, **changes)

        return check

    def _assign(self, words: Words) -> Check:
        sid, epoch, worker, term, _ = words
        before, current = self._see(sid), self._term("run", worker) == int(term)
        reads = self._redis.exists(f"{self._prefix}plan:{worker}")
        if before.state == "queued" and before.epoch == int(epoch) and current and reads:
            return lambda reply: self._expect(sid, before, state="placed", epoch=before.epoch + 1, worker=worker)
        return lambda reply: self._expect(sid, before)

    def _end(self, sid: str, allowed: bool, outcome: Any) -> Check:
        before = self._see(sid)
        if allowed and before.is_open:
            return lambda reply: self._expect(sid, before, state="done", outcome=outcome)
        return lambda reply: self._expect(sid, before)

    def _finish(self, words: Words) -> Check:
        sid, epoch, outcome = words
        return self._end(sid, epoch == "" or self._see(sid).epoch == int(epoch), outcome)

    def _condemn(self, words: Words) -> Check:
        return self._end(words[0], self._see(words[0]).epoch == int(words[1]), words[2])

    def _cancel_if(self, words: Words) -> Check:
        number, outcome, _, *sids = words
        checks = [self._end(sid, self._see(sid).attach == int(number), outcome) for sid in sids]
        return lambda reply: [check(reply) for check in checks] and None

    def _requeue(self, words: Words) -> Check:
        sid, epoch, _ = words
        before = self._see(sid)
        if before.state == "placed" and before.epoch == int(epoch):
            return lambda reply: self._expect(sid, before, state="queued", worker="")
        return lambda reply: self._expect(sid, before)

    def _detach(self, words: Words) -> Check:
        """Who reads it by this number does not any more; nobody else is concerned."""
        number, _, *sids = words
        seen = {sid: self._see(sid) for sid in sids}

        def check(reply: Any) -> None:
            for sid, before in seen.items():
                is_told = before.is_open and before.attach == int(number)
                self._expect(sid, before, gateway="" if is_told else before.gateway)

        return check

    def _attach(self, words: Words) -> Check:
        """A client's attach always wins; a gateway's own only while it is the reader. The number never goes down."""
        rid, gateway, number = words
        sids = [f"{rid}.{i}" for i in range(int(self._redis.hget(f"{self._prefix}r:{rid}", "n") or 0))]
        seen = [self._see(sid) for sid in sids]

        def check(reply: Any) -> None:
            for sid, before in zip(sids, seen, strict=True):
                after = self._see(sid)
                changed = (after.gateway, after.attach) != (before.gateway, before.attach)
                wins = number == "" or before.attach == int(number)
                assert not changed or (wins and after.gateway == gateway and after.attach == before.attach + 1), sid
                assert number != "" or changed, f"{sid}: a client's attach has lost"
                self._expect(sid, before, gateway=after.gateway, attach=after.attach)

        return check

    def _plan(self, words: Words) -> Check:
        kind, worker, term, *_ = words
        stream = f"{self._prefix}plan:{worker}"
        before, current = self._redis.xlen(stream), self._term(kind, worker) == int(term)

        def check(reply: Any) -> None:
            assert current or self._redis.xlen(stream) == before, f"{worker}: planned under term {term}, which is over"

        return check

    def _take_lease(self, words: Words) -> Check:
        """A term is given once: it rises exactly when nobody has the lease."""
        kind, id, owner, _ = words
        holder, before = self._has_lease(kind, id), self._term(kind, id)

        def check(reply: Any) -> None:
            assert self._term(kind, id) == before + (holder is None), f"{kind} {id}"
            assert (reply[0] > 0) == (holder in (None, owner.encode())), f"{kind} {id}: {reply}, held by {holder}"

        return check
