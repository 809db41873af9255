"""What a step costs by its rows, learnt from those that ran. *Pure.*

Rows have a price relative to each other (the shape), which a machine hardly changes, and steps have a level, which
changes with what else runs and how long contexts are. Both are learnt from every step, and only ratios are used. More
rows than were seen are taken to cost what rows between those did. What has not been seen for long is forgotten, and
where only one size is known, the next one of GRID is taken for as cheap: so it is tried now and then.
"""

from __future__ import annotations

import bisect

# Of few rows every number: one more would seem to cost nothing beside another that is filed in the same place.
GRID: tuple[int, ...] = (*range(1, 65), 72, 80, 88, 96, 112, 128, 192, 256, 512, 1024, 4096)
LEVEL_WEIGHT = 0.2  # of the newest step
SHAPE_WEIGHT = 0.05
KEPT_STEPS = 512  # after so many without another, what a step of some rows cost is not known any more


class RowCost:
    def __init__(self) -> None:
        self._shape: dict[int, float] = {}  # of those of GRID that ran
        self._seen_at: dict[int, int] = {}  # the number of the step that had so many rows last
        self._known: list[int] = []  # the keys, in order
        self._level = 0.0
        self._num_steps = 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step all of whose rows are decoded or drafted."""
        if seconds <= 0.0:
            return
        self._num_steps += 1
        at = _nearest(num_rows)
        self._forget_all_but(at)
        if at not in self._shape:
            self._level = self._level or seconds
            self._shape[at] = seconds / self._level
            bisect.insort(self._known, at)
        else:
            off = min(4.0, max(0.25, seconds / (self._level * self._shape[at])))  # one that was held up says little
            self._shape[at] *= off**SHAPE_WEIGHT
            self._level *= off**LEVEL_WEIGHT
        self._seen_at[at] = self._num_steps

    def _forget_all_but(self, at: int) -> None:
        old = [n for n in self._known if n != at and self._num_steps - self._seen_at[n] > KEPT_STEPS]
        if len(old) == len(self._known):
            old = old[1:]  # the level needs one of them, the one with the fewest rows
        for num_rows in old:
            del self._shape[num_rows]
            self._known.remove(num_rows)

    @property
    def unit_s(self) -> float:
        """Of what `relative` says; 0 while nothing is known."""
        return self._level

    def seconds(self, num_rows: int) -> float:
        """Of a step of so many rows; 0 while nothing is known."""
        return self.relative(num_rows) * self._level

    def relative(self, num_rows: int) -> float:
        """Of a step of so many rows, in a unit of its own."""
        known, shape = self._known, self._shape
        if not known:
            return 1.0
        i = bisect.bisect_left(known, num_rows)
        if i == 0:
            return shape[known[0]] * num_rows / known[0]
        low = known[i - 1]
        if i == len(known) == 1:
            return shape[low] * max(1.0, num_rows / GRID[min(GRID.index(low) + 1, len(GRID) - 1)])
        if i == len(known):
            slope = max(0.0, shape[low] - shape[known[0]]) / (low - known[0])
            return shape[low] + slope * (num_rows - low)
        high = known[i]
        return shape[low] + (shape[high] - shape[low]) * (num_rows - low) / (high - low)


def _nearest(num_rows: int) -> int:
    i = min(bisect.bisect_left(GRID, num_rows), len(GRID) - 1)
    return GRID[i - 1] if i and num_rows - GRID[i - 1] < GRID[i] - num_rows else GRID[i]
