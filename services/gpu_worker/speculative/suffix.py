"""Drafts by suffix lookup: what followed the longest part of the text's end that stood before. *Pure.*

The match is followed as long as the text goes on as it did there, so that its length says how much may be trusted.
Where it stops, the last few tokens are looked up, the latest place first; and if they are new, the text may go on one
token after the place where it differed, as copies with changes do.
"""

from __future__ import annotations

from services.gpu_worker.speculative.proposer import EXPECTED_STRENGTH, NOTHING, TOKEN_BITS, Proposal, going_on

SIZES = (4, 2, 1)  # of what is looked up
KEY_MASKS = tuple((1 << size * TOKEN_BITS) - 1 for size in SIZES)
MAX_LENGTH = 64  # of a match, as far as it is counted
WORTH_RESUMING = 4  # shorter matches are chance


class SuffixProposer:
    def __init__(self) -> None:
        self._text: list[int] = []
        self._key = 0  # the last tokens, in TOKEN_BITS each
        self._ends: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._source = -1  # what may come next stands there, after `_length` equal tokens; -1: nowhere
        self._length = 0

    def append(self, token_id: int) -> None:
        text, was_right = self._text, False
        if self._source >= 0:
            was_right = text[self._source] == token_id
        text.append(token_id)
        self._key = (self._key << TOKEN_BITS | token_id) & KEY_MASKS[0]
        found = self._note()
        if was_right:
            self._source, self._length = self._source + 1, min(self._length + 1, MAX_LENGTH)
        elif found >= 0:
            self._source, self._length = found, self._common(found)
        elif self._length >= WORTH_RESUMING:
            self._source, self._length = self._source + 1, 0
        else:
            self._source, self._length = -1, 0

    def _note(self) -> int:
        """Where the longest of the last tokens ended before; from now on they end here."""
        text, found = self._text, -1
        for size, mask, ends in zip(SIZES, KEY_MASKS, self._ends, strict=True):
            if len(text) < size:
                continue
            gram = self._key & mask
            if found < 0:
                found = ends.get(gram, -1)
            ends[gram] = len(text)
        return found

    def _common(self, end: int) -> int:
        text, length = self._text, 0
        while length < min(end, MAX_LENGTH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def expect(self, count: int) -> None:
        self._source, self._length = len(self._text) - count, EXPECTED_STRENGTH

    def propose(self, most: int) -> Proposal:
        if self._source < 0 or most < 1:
            return NOTHING
        return going_on(self._text, self._source, most, self._length, MAX_LENGTH)
