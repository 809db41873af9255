"""What happens when, from a seed: the same seed gives the same faults at the same times to the same processes. *Pure.*

What comes of a fault depends on where everybody is at that moment, which no seed fixes; but a seed that has found
something finds it again within a few runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from shared.protocol import MemberKind

KINDS: list[MemberKind] = ["worker", "worker", "scheduler", "store", "gateway"]
GAPS_S = (0.2, 2.0)
LENGTHS_S = (0.3, 1.2, 3.0, 7.0)  # shorter than any lease, longer than a busy one's, longer than all

# name → how often, in relation to the others
ON_PROCESSES = {
    "is killed": 6, "is told to stop": 3, "stands still": 4, "is cut off": 3, "is deaf": 1, "is mute": 1,
    "is delayed": 2, "loses its connections": 2, "crashes": 6, "has no files left": 1,
}  # fmt: skip
ON_REDIS = {"is killed": 1, "drops all clients": 1, "pauses": 2, "forgets scripts": 1, "is full": 1}
MOMENTS: dict[MemberKind, tuple[str, ...]] = {
    "gateway": ("admit", "finish", "cancel_if", "refresh"),
    "scheduler": ("assign", "plan", "send", "take_lease", "join", "requeue", "bury"),
    "store": ("send", "take_lease", "plan", "join"),
    "worker": ("commit", "send", "join", "refresh", "requeue"),
}


@dataclass(frozen=True)
class Fault:
    """kind "redis" or a service's. gap_s: after the one before. detail: of a crash, the moment."""

    gap_s: float
    what: str
    kind: str
    index: int
    length_s: float
    detail: str = ""

    def __str__(self) -> str:
        lasting = f" for {self.length_s} s" if self.what in LASTING else ""
        name = "Redis" if self.kind == "redis" else f"{self.kind}-{self.index}"
        return f"{name} {self.what} {self.detail}".rstrip() + lasting


LASTING = {
    "stands still", "is cut off", "is deaf", "is mute", "is delayed", "pauses", "is full", "has no files left",
}  # fmt: skip


def faults(seed: int) -> Iterator[Fault]:
    """Without end."""
    rng = random.Random(seed)
    while True:
        yield _draw(rng)


def _draw(rng: random.Random) -> Fault:
    gap_s, length_s, index = round(rng.uniform(*GAPS_S), 2), rng.choice(LENGTHS_S), rng.randrange(2)
    if rng.random() < 0.1:
        return Fault(gap_s, _choose(rng, ON_REDIS), "redis", 0, min(length_s, 3.0))
    kind = rng.choice(KINDS)
    what, detail = _choose(rng, ON_PROCESSES), ""
    if what == "crashes":
        detail = f"{rng.choice(('before', 'after'))}-{rng.choice(MOMENTS[kind])}:{rng.choice((1, 1, 2, 5, 20))}"
    if what == "has no files left":
        kind = "gateway"  # who is met by connections from outside
    return Fault(gap_s, what, kind, index, length_s, detail)


def _choose(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
