"""How k replicas of a service share the leases on w workers: at most ceil(w / k) each.

Takes what is free (or a dead replica's) below the fair share, hands over what is above it, refreshes the rest. What a
lease means, and when one can be handed over, is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from shared.leases import IDLE_LEASE_MS
from shared.scripts import Scripts


@dataclass
class Changes:
    """gained: worker -> the new term of my lease. lost: it is another's now, or was handed over."""

    gained: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)  # above the fair share, but not to be dropped yet


async def share_leases(
    scripts: Scripts, kind: str, me: str, *, mine: Mapping[str, int], owners: Mapping[str, str], num_replicas: int,
    is_dead: Callable[[str], bool], may_drop: Callable[[str], bool] = lambda worker: True,
) -> Changes:  # fmt: skip
    """kind: run or pool. mine: worker -> term. owners: every live worker -> who leases it now ("" nobody)."""
    changes = Changes(lost=[w for w in mine if w not in owners])
    held = set(mine) - set(changes.lost)
    fair = math.ceil(len(owners) / max(1, num_replicas))
    for worker in sorted(held)[fair:]:
        if may_drop(worker):
            await scripts.drop_lease(kind, worker, me)
            changes.lost.append(worker)
            held.discard(worker)
        else:
            changes.surplus.append(worker)
    for worker, owner in sorted(owners.items()):
        if worker in changes.lost:
            continue
        if owner not in ("", me):
            if worker in held:
                _lose(worker, held, changes)
            if not is_dead(owner):
                continue
            await scripts.drop_lease(kind, worker, owner)
        if worker in held or len(held) < fair:
            await _take(scripts, kind, worker, me, mine, held, changes)
    return changes


async def _take(
    scripts: Scripts, kind: str, worker: str, me: str, mine: Mapping[str, int], held: set[str], changes: Changes
) -> None:
    term, _ = await scripts.take_lease(kind, worker, me, IDLE_LEASE_MS)
    if term and mine.get(worker) == term:
        return
    if worker in held:
        _lose(worker, held, changes)
    if term:
        changes.gained[worker] = term
        held.add(worker)


def _lose(worker: str, held: set[str], changes: Changes) -> None:
    changes.lost.append(worker)
    held.discard(worker)
    if worker in changes.surplus:
        changes.surplus.remove(worker)


def is_member_dead(alive: Collection[str], said_gone: Collection[str], leases_trusted: bool) -> Callable[[str], bool]:
    """A missing lease proves death only while leases are trusted; its own or its supervisor's word always does."""
    return lambda incarnation: incarnation in said_gone or (leases_trusted and incarnation not in alive)
