"""Finds stop strings in text that arrives in pieces, and says how much of it may still become one. *Pure.*

Each stop string is followed by the Knuth-Morris-Pratt automaton: its state is the longest suffix of the text that
begins the stop string, which is exactly what must be held back. Linear in the text, and two bytes of memory a
character of a stop string, so that requests with the most and longest ones cost little. Knows nothing of tokens;
positions are characters from the start of the text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Match:
    """Where a stop string begins in the whole text, and which it is."""

    start: int
    stop: str


@lru_cache(maxsize=1024)
def _borders(stop: str) -> array[int]:
    """For each prefix length, the length of its longest proper prefix that is also its suffix."""
    borders = array("H", [0] * (len(stop) + 1))
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length]
        length += stop[i] == stop[length]
        borders[i + 1] = length
    return borders


class StopMatcher:
    """The matching state of one text. num_held: characters at its end that may still become a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._num_chars = 0
        self.num_held = 0

    def push(self, text: str) -> Match | None:
        """Of the stop strings that end in this piece, the one that begins first; of equal beginnings the shortest."""
        best: Match | None = None
        self.num_held = 0
        for i, (stop, borders) in enumerate(self._stops):
            state = self._states[i]
            if not state and stop[0] not in text:
                continue
            for end, char in enumerate(text, self._num_chars + 1):
                while state and (state == len(stop) or stop[state] != char):
                    state = borders[state]
                state += stop[state] == char
                if state == len(stop):
                    match = Match(end - state, stop)
                    if best is None or (match.start, state) < (best.start, len(best.stop)):
                        best = match
            self._states[i] = state
            self.num_held = max(self.num_held, state if state < len(stop) else borders[state])
        self._num_chars += len(text)
        return best
