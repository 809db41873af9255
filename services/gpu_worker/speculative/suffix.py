"""Drafts by suffix lookup: what followed the longest part of the text's end that stood before. *Pure.*

The match is followed as long as the text goes on as it did there, so that its length says how much may be trusted.
Where it stops, the last few tokens are looked up, the latest place first. What stopped was perhaps a form whose values
are new each time: so, as long as no longer match is found, the next tokens there are looked through for the latest one.
And if nothing is found, the text may go on one token after the place where it differed, as copies with changes do.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.gpu_worker.speculative.proposer import EXPECTED_STRENGTH, NOTHING, TOKEN_BITS, Guessed, Proposal, going_on

SIZES = (4, 2, 1)  # of what is looked up
KEY_MASKS = tuple((1 << size * TOKEN_BITS) - 1 for size in SIZES)
MAX_LENGTH = 64  # of a match, as far as it is counted
WORTH_RESUMING = 4  # shorter matches are chance
FORM_TOKENS = 16  # behind the place where a form was left, that are looked through
SURER_THAN_FORM = 3  # tokens of a match


class SuffixProposer:
    def __init__(self) -> None:
        self._text: list[int] = []
        self._key = 0  # the last tokens, in TOKEN_BITS each
        self._ends: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._source = -1  # what may come next stands there, after `_length` equal tokens; -1: nowhere
        self._length = 0
        self._form = -1  # behind the token at which a long match was left

    def read(self, ids: Seq[int]) -> None:
        self.follow(ids)

    def follow(self, ids: Seq[int]) -> list[Guessed]:
        """One loop over local names: it runs for every token of every text."""
        text, key, source, length = self._text, self._key, self._source, self._length
        (longest, middle, shortest), (mask, middle_mask, shortest_mask) = self._ends, KEY_MASKS
        at, guessed = len(text), []
        for token_id in ids:
            was_right = False
            if source >= 0:
                was_right = text[source] == token_id
                guessed.append((length, was_right))
            text.append(token_id)
            at += 1
            key = (key << TOKEN_BITS | token_id) & mask
            middle_key, shortest_key = key & middle_mask, key & shortest_mask
            if was_right:
                source += 1
                if length < MAX_LENGTH:
                    length += 1
            else:
                found = longest.get(key, -1) if at > 3 else -1
                if found < 0 and at > 1:
                    found = middle.get(middle_key, -1)
                source, length = self._moved(found if found >= 0 else shortest.get(shortest_key, -1), source, length)
            if at > 3:
                longest[key] = at
            if at > 1:
                middle[middle_key] = at
            shortest[shortest_key] = at
        self._key, self._source, self._length = key, source, length
        return guessed

    def _moved(self, found: int, source: int, length: int) -> tuple[int, int]:
        """Where the text may go on, after a token that was not expected. found: where its last tokens ended before;
        source, length: of the match that was followed."""
        common = self._common(found) if found >= 0 else 0
        if common < SURER_THAN_FORM and (again := self._in_form()) >= 0:
            return again, self._common(again)
        if length >= WORTH_RESUMING:
            self._form = source + 1
            if found < 0:
                return source + 1, 0
        return found, common

    def _in_form(self) -> int:
        """Behind the latest token, where the form has it next; -1: nowhere."""
        text, form = self._text, self._form
        if form < 0:
            return -1
        try:
            return text.index(text[-1], form, min(form + FORM_TOKENS, len(text) - 1)) + 1
        except ValueError:
            return -1

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
