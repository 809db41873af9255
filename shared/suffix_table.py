"""What has followed which tokens, as a hash table of fixed words: a fleet's statistics of its answers. *Pure.*

Each entry says of a context which token has followed it, and how sure that is. It is one word of 64 bits: 40 of the
context's hash, the token, and a count of 1 to 15, so that entries can be sent as they are and mean the same in a table
of any size. A table has lines of four entries, doubles while it fills, and has a largest size; then the least sure of a
line gives way. Reading needs no lock: an entry is read and written as a whole.

Contexts are the last 8, 4 or 2 tokens. Behind a value that is another in every answer all of those are new, so there is
one more, which leaves it out: the last five that the table had foreseen, and the last token. Thus the token that ends a
value in a form tells which field comes next, whatever the value was.

Who learns is `services/cache_store/fleet_learner.py`; workers hold copies of what it has found out.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LENGTHS = (8, 4, 2)  # of contexts of the last tokens
FRAME_LENGTH = 5  # of foreseen tokens in the context that leaves values out
SETTLED = 4  # foreseen tokens in a row; from then on that context tells nothing that the others do not
TOKEN_BITS = 20
MAX_TOKEN_ID = (1 << TOKEN_BITS) - 1  # of a vocabulary of a million; others are not learnt
COUNT_BITS = 4
MAX_COUNT = (1 << COUNT_BITS) - 1
MIN_COUNT = 2  # of what is sure enough to be guessed: what was seen once is mostly never seen again
WAYS = 4
MIN_LINES, MAX_LINES = 1 << 6, 1 << 15
HEAD_BITS = TOKEN_BITS + COUNT_BITS
HASH_MASK = (1 << 64 - HEAD_BITS) - 1
WINDOW_BITS = 32  # of a token in a window
CONTEXTS = tuple((1 << n * WINDOW_BITS) - 1 for n in LENGTHS)
MARKS = tuple(1 << n * WINDOW_BITS for n in LENGTHS)  # before a context: zeros are tokens too
TOKEN_MASK = (1 << WINDOW_BITS) - 1
WINDOW_MASK = CONTEXTS[0]
FRAME_MASK = (1 << FRAME_LENGTH * WINDOW_BITS) - 1
# A hash is the middle of a square, of what a factor and a prime leave of a context; each kind has another prime. So all
# bits of a context reach all bits of its hash, and contexts that differ by steps are spread as if by chance.
PRIMES = (2185628714235507769, 1343817662724950521, 1226063409010618709)
FACTOR = 548693975418329057
FRAME_PRIME = 2063322497467419961
MIDDLE = 40  # bits of a square below
ABSENT = -1
NEEDED = (*LENGTHS[:2], 1, LENGTHS[2])  # tokens before, by kind of context
NUM_LEVELS = 3  # of counts: 2 to 3, 4 to 7, 8 to 15
MAX_STRENGTH = NUM_LEVELS * len(NEEDED)


class Place(NamedTuple):
    """Behind a token. window: the last tokens; frame: the last that were foreseen, or given by a prompt; num_foreseen:
    in a row, up to SETTLED."""

    window: int = 0
    frame: int = 0
    num_foreseen: int = SETTLED

    def given(self, token_id: int) -> Place:
        """One token later, in a prompt."""
        window = (self.window << WINDOW_BITS | token_id) & WINDOW_MASK
        return Place(window, window & FRAME_MASK, SETTLED)

    def foreseen(self, token_id: int) -> Place:
        """One later, which the table has said."""
        window, frame, num = self
        return Place(
            (window << WINDOW_BITS | token_id) & WINDOW_MASK,
            (frame << WINDOW_BITS | token_id) & FRAME_MASK,
            num + (num < SETTLED),
        )

    def surprised(self, token_id: int) -> Place:
        """One later, which it has not."""
        return Place((self.window << WINDOW_BITS | token_id) & WINDOW_MASK, self.frame, 0)

    def hashes(self) -> Iterator[int]:
        """Of the contexts there, the one that tells most first. ABSENT: of that kind there is none."""
        window, frame, num_foreseen = self
        rest = (window + MARKS[0]) * FACTOR % PRIMES[0]
        yield rest * rest >> MIDDLE & HASH_MASK
        rest = ((window & CONTEXTS[1]) + MARKS[1]) * FACTOR % PRIMES[1]
        yield rest * rest >> MIDDLE & HASH_MASK
        if frame and num_foreseen < SETTLED:
            framed = frame if num_foreseen else frame << WINDOW_BITS | window & TOKEN_MASK
            rest = framed * FACTOR % FRAME_PRIME
            yield rest * rest >> MIDDLE & HASH_MASK
        else:
            yield ABSENT
        rest = ((window & CONTEXTS[2]) + MARKS[2]) * FACTOR % PRIMES[2]
        yield rest * rest >> MIDDLE & HASH_MASK


START = Place()


def place_of(ids: Iterable[int]) -> Place:
    """Behind a prompt."""
    place = START
    for token_id in ids:
        place = place.given(token_id)
    return place


def level_of(count: int) -> int:
    """0: not sure enough to be used, up to NUM_LEVELS."""
    return max(0, count.bit_length() - 1)


class SuffixTable:
    """words: all lines, 0 where an entry is free."""

    def __init__(self) -> None:
        self.words = array("Q", bytes(8 * WAYS * MIN_LINES))
        self.num_entries = 0
        self._line_mask = MIN_LINES - 1

    @property
    def num_bytes(self) -> int:
        return len(self.words) * self.words.itemsize

    @property
    def num_lines(self) -> int:
        return self._line_mask + 1

    def best(self, place: Place) -> tuple[int, int]:
        """The token that has followed the context there that tells most, with its strength: 1 to MAX_STRENGTH, more
        for better contexts, then for higher counts. Strength 0: nothing is known."""
        words, line_mask = self.words, self._line_mask
        strength = MAX_STRENGTH - NUM_LEVELS
        for hashed in place.hashes():
            first = (hashed & line_mask) * WAYS
            for word in words[first : first + WAYS]:
                if word >> HEAD_BITS == hashed and (level := level_of(word & MAX_COUNT)):
                    return word >> COUNT_BITS & MAX_TOKEN_ID, strength + level
            strength -= NUM_LEVELS
        return 0, 0

    def put(self, words: Iterable[int]) -> None:
        """Entries of another table, which know more than those that are here. One that is not sure takes no room."""
        for word in words:
            at = self._find(word >> HEAD_BITS)
            if at >= 0 and word & MAX_COUNT:
                self.words[at] = word
            elif word & MAX_COUNT >= MIN_COUNT:
                self._insert(word)

    def _find(self, hashed: int) -> int:
        """Where its entry is; -1: nowhere."""
        first = (hashed & self._line_mask) * WAYS
        for at, word in enumerate(self.words[first : first + WAYS], first):
            if word >> HEAD_BITS == hashed and word:
                return at
        return -1

    def _insert(self, word: int) -> int:
        """A new entry; where, or -1. In a full line of a table that cannot grow the least sure entry gives way, which
        takes as many tries as it is sure."""
        while True:
            line = word >> HEAD_BITS & self._line_mask
            counts = [self._count_in(line, w) for w in self.words[line * WAYS : (line + 1) * WAYS]]
            least = min(counts)
            at = line * WAYS + counts.index(least)
            if least == 0:
                self.num_entries += 1
            elif self.num_lines < MAX_LINES and 3 * self.num_entries > len(self.words):
                self._grow()
                continue
            elif least > 1:
                self.words[at] -= 1
                return -1
            self.words[at] = word
            return at

    def _count_in(self, line: int, word: int) -> int:
        """0 for what growing has left behind: it is in another line, too."""
        return word & MAX_COUNT if word >> HEAD_BITS & self._line_mask == line else 0

    def _grow(self) -> None:
        """To twice the lines, at the cost of a copy: all entries are in both halves, and found in the one where they
        belong. In the other they are as good as free."""
        self.words = self.words + self.words
        self._line_mask = len(self.words) // WAYS - 1


def pack_words(words: array[int]) -> bytes:
    """Little-endian, as messages carry them."""
    return _little_endian(words).tobytes()


def unpack_words(data: bytes) -> array[int]:
    """Without a rest that is no whole word."""
    words = array("Q")
    words.frombytes(data[: len(data) & -words.itemsize])
    return _little_endian(words)


def _little_endian(words: array[int]) -> array[int]:
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words
