"""What a store learns of one tenant's answers, and which of it a worker has not had yet. *Pure.*

A token that follows a context again counts one more, another one two less, until it takes the other's place: so what
follows in two cases of three stays sure, what has changed is learnt anew, and what nobody asks for gives way to others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from shared.suffix_table import (
    ABSENT,
    COUNT_BITS,
    HEAD_BITS,
    MAX_COUNT,
    MAX_TOKEN_ID,
    MIN_COUNT,
    NEEDED,
    START,
    WAYS,
    Place,
    SuffixTable,
    level_of,
)

CONTRADICTION = 2  # what another token takes off a count


class FleetLearner(SuffixTable):
    """version: of the present state; it rises with every call of `learn`. A line has the version in which something
    that workers use changed in it last."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self._versions = array("Q", bytes(8 * self.num_lines))

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + len(self._versions) * self._versions.itemsize

    def learn(self, ids: Iterable[int], place: Place = START, num_before: int = 0) -> Place:
        """That these tokens have followed a text, of which num_before tokens are in the place; the place after."""
        self.version += 1
        for token_id in ids:
            if token_id <= MAX_TOKEN_ID and self._note(place, num_before, token_id):
                place = place.foreseen(token_id)
            else:
                place = place.surprised(token_id)
            num_before += 1
        return place

    def _note(self, place: Place, num_before: int, token_id: int) -> bool:
        """Was it foreseen?"""
        said = -1
        for needed, hashed in zip(NEEDED, place.hashes(), strict=True):
            if num_before < needed or hashed == ABSENT:
                continue
            at = self._find(hashed)
            if at < 0:
                self._insert(hashed << HEAD_BITS | token_id << COUNT_BITS | 1)
                continue
            old = self.words[at]
            new = self.words[at] = _counted(old, token_id)
            if said < 0 and old & MAX_COUNT >= MIN_COUNT:
                said = old >> COUNT_BITS & MAX_TOKEN_ID
            if level_of(old & MAX_COUNT) != level_of(new & MAX_COUNT):
                self._versions[at // WAYS] = self.version
        return said == token_id

    def changes_since(self, version: int, most_lines: int) -> tuple[array[int], int]:
        """Entries of lines that have changed after that version, and up to which version those are all; the oldest
        changes first, of about so many lines at most."""
        reached, words = self.version, array("Q")
        if version >= reached:
            return words, reached
        changes = [v for v in self._versions if v > version]
        if len(changes) > most_lines:
            changes.sort()
            reached = changes[most_lines - 1]
        for line, changed in enumerate(self._versions):
            if version < changed <= reached:
                words.extend([w for w in self.words[line * WAYS : (line + 1) * WAYS] if self._count_in(line, w)])
        return words, reached

    def _grow(self) -> None:
        super()._grow()
        self._versions += self._versions


def _counted(word: int, token_id: int) -> int:
    count = word & MAX_COUNT
    if word >> COUNT_BITS & MAX_TOKEN_ID == token_id:
        return word + (count < MAX_COUNT)
    if count > CONTRADICTION:
        return word - CONTRADICTION
    return word >> HEAD_BITS << HEAD_BITS | token_id << COUNT_BITS | 1
