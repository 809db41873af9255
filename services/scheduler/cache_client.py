"""Calls to cache stores that are under way, each repeated until it is answered. *Pure.*

A call is a state, so a repeat is harmless; the exception is `Reconcile`, which a later update would contradict: it is
never repeated, its sender asks the worker for its state again instead. `Match` is not repeated either: it is a question
whose answer is soon of no use. Calls of an old pool term are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.store_calls import Ensure, Match, Reconcile, StoreCall

REPEAT_AFTER_S = 0.2


@dataclass(slots=True)
class PendingCall:
    store: str
    message: StoreCall
    sent_at: float


class CacheCalls:
    def __init__(self, reply_to: str) -> None:
        self.reply_to = reply_to
        self._next = 1
        self._pending: dict[int, PendingCall] = {}

    def new_id(self) -> int:
        self._next += 1
        return self._next - 1

    def sent(self, store: str, message: StoreCall, now: float) -> None:
        self._pending[message.call] = PendingCall(store, message, now)

    def answered(self, call: int) -> StoreCall | None:
        """The message that this answers; None for a second answer to a repeated call, or one no longer waited for."""
        pending = self._pending.pop(call, None)
        return pending.message if pending else None

    def forget(self, worker: str) -> None:
        """The worker's pool has a new term, or is no longer ours: whatever was asked is void."""
        self._pending = {c: p for c, p in self._pending.items() if p.message.worker != worker}

    def pending(self, worker: str) -> bool:
        """Does anything that its store may still answer change how many of its blocks are free?"""
        return any(p.message.worker == worker and not isinstance(p.message, Match) for p in self._pending.values())

    def drop(self, sid: str, epoch: int) -> None:
        """Nobody waits for the blocks of this place any more."""
        for call, p in list(self._pending.items()):
            if isinstance(p.message, Ensure) and (p.message.sid, p.message.epoch) == (sid, epoch):
                del self._pending[call]

    def overdue(self, now: float) -> list[PendingCall]:
        """Calls to repeat now; each is marked as sent again. Where a `Match` is late, nobody waits for it any more."""
        late = [p for p in self._pending.values() if now - p.sent_at >= REPEAT_AFTER_S]
        for p in late:
            if isinstance(p.message, Match):
                del self._pending[p.message.call]
        late = [p for p in late if not isinstance(p.message, Match | Reconcile)]
        for p in late:
            p.sent_at = now
        return late

    def __len__(self) -> int:
        return len(self._pending)
