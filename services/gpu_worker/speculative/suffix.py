"""Drafts by suffix lookup: what followed the longest part of the text's end that stood before. *Pure.*

The match is followed as long as the text goes on as it did there, so that its length says how much may be trusted.
Where it stops, the last few tokens are looked up, the latest place first. What stopped was perhaps a form whose values
are new each time: so, as long as no longer match is found, the next tokens there are looked through for the latest one.
And if nothing is found, the text may go on one token after the place where it differed, as copies with changes do.

Changes repeat. Where the same token came instead of another twice in a row, it is proposed in its place, and then what
followed it the last time: so ends the value of a form that was copied from where something else follows. And where a
token came whose id is one above that of the token expected there, as digits' are in most vocabularies, the next one is
proposed in its turn, unless such a place was copied last: lists and records that are numbered.

How a token came where the match is says as much as how long that is: one that was foreseen there will be here too, and
one at which a match was left is left again. So these are told apart, as kinds of strength.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from services.gpu_worker.speculative.proposer import (
    EXPECTED_STRENGTH,
    KIND,
    NOTHING,
    TOKEN_BITS,
    Guessed,
    Proposal,
)

SIZES = (4, 2, 1)  # of what is looked up
KEY_MASKS = tuple((1 << size * TOKEN_BITS) - 1 for size in SIZES)
MAX_LENGTH = 64  # of a match, as far as it is counted
WORTH_RESUMING = 4  # shorter matches are chance
FORM_TOKENS = 16  # behind the place where a form was left, that are looked through
SURER_THAN_FORM = 3  # tokens of a match
# LEFT: at which a match of SURER_THAN_FORM was left. COUNTED: one more than where it is copied from.
NEW, FORESEEN, LEFT, CHANGED, COUNTED = (number * KIND for number in range(5))
SURE_CHANGE = 2  # times in a row
MOST_COUNTED = COUNTED + MAX_LENGTH  # times in a row
NO_CHANGE = (-1, 0)


def expected_of_match(strength: int) -> float:
    """After so many equal tokens in the same text, of which few are chance, or so many times that a change was made: as
    answers of all kinds had it."""
    kind, count = divmod(strength, KIND)
    if kind * KIND in (NEW, FORESEEN):
        return count * count / (count * count + (1 if kind else 8))
    return count / (count + (8 if kind * KIND == LEFT else 1))


class SuffixProposer:
    def __init__(self) -> None:
        self._text: list[int] = []
        self._kinds = array("h")  # of its tokens: how each of them came
        self._key = 0  # the last tokens, in TOKEN_BITS each
        self._ends: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._source = -1  # what may come next stands there, after `_length` equal tokens; -1: nowhere
        self._length = 0
        self._largest = -1  # token id of the text: none above is proposed, since it may be none
        self._counts_up = False  # where it did before; if not, those places are copied
        self._form = -1  # behind the token at which a long match was left
        self._changes: dict[int, tuple[int, int]] = {}  # what came instead of a token: where last, and how often

    def read(self, ids: Seq[int]) -> None:
        self.follow(ids)

    def follow(self, ids: Seq[int]) -> list[Guessed]:
        """One loop over local names: it runs for every token of every text."""
        text, kinds, changes, key = self._text, self._kinds, self._changes, self._key
        source, length, largest, counts = self._source, self._length, self._largest, self._counts_up
        (longest, middle, shortest), (mask, middle_mask, shortest_mask) = self._ends, KEY_MASKS
        at, guessed = len(text), []
        for token_id in ids:
            is_same, kind, instead = False, NEW, -1
            if source >= 0:
                expected, strength = text[source], kinds[source] + length
                is_same = is_right = expected == token_id
                if (counted := kinds[source]) > COUNTED:
                    is_next = expected + 1 == token_id
                    is_right, strength = (is_next, counted) if counts else (is_same, FORESEEN + length)
                    if is_same or is_next:
                        is_same, counts = True, is_next
                elif length and expected in changes:
                    times, was_changed, instead = self._change_again(expected, token_id, at)
                    if times >= SURE_CHANGE:
                        is_right, strength = was_changed, CHANGED + times
                elif length and not is_same:
                    changes[expected] = at, 1
                guessed.append((strength, is_right))
                if length and expected + 1 == token_id < largest:
                    kind, counts = min(max(COUNTED, counted) + 1, MOST_COUNTED), True
                else:
                    kind = FORESEEN if is_right else LEFT if length >= SURER_THAN_FORM else NEW
            text.append(token_id)
            kinds.append(kind)
            if token_id > largest:
                largest = token_id
            at += 1
            key = (key << TOKEN_BITS | token_id) & mask
            middle_key, shortest_key = key & middle_mask, key & shortest_mask
            if is_same:
                source += 1
                if length < MAX_LENGTH:
                    length += 1
            else:
                found = longest.get(key, -1) if at > 3 else -1
                if found < 0 and at > 1:
                    found = middle.get(middle_key, -1)
                before = length
                source, length = self._moved(found if found >= 0 else shortest.get(shortest_key, -1), source, length)
                if instead >= 0 and length < SURER_THAN_FORM:
                    source, length = instead + 1, max(self._common(instead + 1), min(before, WORTH_RESUMING))
            if at > 3:
                longest[key] = at
            if at > 1:
                middle[middle_key] = at
            shortest[shortest_key] = at
        self._key, self._source, self._length, self._largest, self._counts_up = key, source, length, largest, counts
        return guessed

    def _change_again(self, expected: int, token_id: int, at: int) -> tuple[int, bool, int]:
        """Notes what came, at this place, where another had come before instead of the expected one: how often in a row
        that had been so, whether it is again, and where it was last if that is sure; else -1."""
        place, times = self._changes[expected]
        was_changed = self._text[place] == token_id
        if expected == token_id:
            del self._changes[expected]
        else:
            self._changes[expected] = at, min(times + 1, MAX_LENGTH) if was_changed else 1
        return times, was_changed, place if was_changed and times + 1 >= SURE_CHANGE else -1

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
        self._source, self._length, self._counts_up = len(self._text) - count, EXPECTED_STRENGTH, False

    def propose(self, most: int) -> Proposal:
        """Where the text ends it goes on as if it repeated from there."""
        source, text, kinds, changes = self._source, self._text, self._kinds, self._changes
        if source < 0 or most < 1:
            return NOTHING
        ids, strengths = [], []
        for length in range(self._length, self._length + most):
            if source == len(text):
                source = self._source
            token_id, kind, equal = text[source], kinds[source], min(length, MAX_LENGTH)
            place, times = changes.get(token_id, NO_CHANGE)
            strength = kind + equal
            if kind > COUNTED and self._counts_up:
                token_id, strength = token_id + 1, kind
            elif kind > COUNTED:
                strength = FORESEEN + equal
            elif times >= SURE_CHANGE and length:
                source, token_id, strength = place, text[place], CHANGED + times
            ids.append(token_id)
            strengths.append(strength)
            source += 1
        return Proposal(tuple(ids), tuple(strengths))
