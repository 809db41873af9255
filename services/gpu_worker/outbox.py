"""What the next report has to say: kept until a commit that carried it was acknowledged. *Pure.*

Reports are states, so carrying something twice is harmless; leaving it out is not. A report is bounded, and an end is
never told before the seals of that sequence, nor before its last token is in the same commit or already in the log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from services.gpu_worker.commits import Place
from shared.worker_protocol import Ended, Seal, Taken

MAX_SEAL_BYTES = 192 * 1024  # of the seals in one report
SEAL_BYTES = 64  # of a seal without its tokens


@dataclass(frozen=True, slots=True)
class Carried:
    """What one report says."""

    taken: tuple[Taken, ...]
    seals: tuple[Seal, ...]
    ended: tuple[Ended, ...]
    version: int
    taken_from: int = -1  # number of the first of taken; -1: not said


NOTHING = Carried((), (), (), -1)


class Outbox:
    def __init__(self) -> None:
        self._taken: list[Taken] = []
        self.num_told = 0  # of what was taken, before `_taken`
        self._seals: list[Seal] = []
        self._ended: list[Ended] = []
        self._version = 0  # rises with every change that must be told at once
        self._told = 0

    def __bool__(self) -> bool:
        return bool(self._taken or self._seals or self._ended or self._version != self._told)

    @property
    def urgent(self) -> bool:
        return self._version != self._told

    def touch(self) -> None:
        """Something has changed that a decision waits for; the rest goes along within `pacing.DETAILS_S`."""
        self._version += 1

    def took(self, taken: Taken) -> None:
        self._taken.append(taken)

    def sealed(self, seals: Iterable[Seal]) -> None:
        self._seals += seals

    def ended(self, sid: str, epoch: int, reason: str) -> None:
        self._ended.append(Ended.unchecked(sid=sid, epoch=epoch, reason=reason))
        self.touch()

    def superseded(self, seals: list[Seal]) -> None:
        """A full running state goes out, which says all but these seals."""
        self._told_taken(len(self._taken))
        self._seals = seals

    def carry(self, unsettled: Collection[Place]) -> Carried:
        """The next report's content. unsettled: places whose end must wait. (`NOTHING` may be carried at any time.)"""
        seals, rest = cut_seals(self._seals, MAX_SEAL_BYTES)
        waiting = {(s.sid, s.epoch) for s in rest} | set(unsettled)
        ended = tuple(e for e in self._ended if (e.sid, e.epoch) not in waiting)
        version = self._version if not rest and len(ended) == len(self._ended) else self._told
        return Carried(tuple(self._taken), tuple(seals), ended, version, self.num_told)

    def acknowledged(self, carried: Carried) -> None:
        """Nothing may have been superseded or cleared since `carry`."""
        if carried is NOTHING:
            return
        self._told_taken(len(carried.taken))
        del self._seals[: len(carried.seals)]
        told = set(map(id, carried.ended))
        self._ended = [e for e in self._ended if id(e) not in told]
        self._told = carried.version

    def _told_taken(self, count: int) -> None:
        del self._taken[:count]
        self.num_told += count

    def clear(self) -> None:
        self._told_taken(len(self._taken))
        self._seals.clear()
        self._ended.clear()
        self._told = self._version


def cut_seals(seals: list[Seal], max_bytes: int) -> tuple[list[Seal], list[Seal]]:
    """As many as fit, at least one; and the rest."""
    num_bytes = 0
    for i, seal in enumerate(seals):
        num_bytes += SEAL_BYTES + 4 * len(seal.ids)
        if i and num_bytes > max_bytes:
            return seals[:i], seals[i:]
    return seals, []
