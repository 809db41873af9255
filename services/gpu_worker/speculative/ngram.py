"""Drafts by n-gram lookup: what followed the last n tokens where they stood before. *Pure.*

The longest n between prompt_lookup_min and prompt_lookup_max for which there is such a place, and the latest place. As
prompt lookup in vLLM and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.gpu_worker.speculative.proposer import EXPECTED_STRENGTH, NOTHING, TOKEN_BITS, Guessed, Proposal


class NgramProposer:
    def __init__(self, shortest: int, longest: int) -> None:
        self._longest = longest
        self._text: list[int] = []
        self._key = 0  # the last tokens, in TOKEN_BITS each
        self._ends: dict[int, dict[int, int]] = {n: {} for n in range(longest, shortest - 1, -1)}
        self._source = 0  # what may come next stands there, after `_length` equal tokens
        self._length = 0

    def read(self, ids: Seq[int]) -> None:
        self.follow(ids)

    def follow(self, ids: Seq[int]) -> list[Guessed]:
        guessed = []
        for token_id in ids:
            if self._length:
                guessed.append((self._length, self._text[self._source] == token_id))
            self._append(token_id)
        return guessed

    def _append(self, token_id: int) -> None:
        text = self._text
        text.append(token_id)
        self._key = (self._key << TOKEN_BITS | token_id) & ((1 << self._longest * TOKEN_BITS) - 1)
        self._length = 0
        for n, ends in self._ends.items():
            if len(text) < n:
                continue
            gram, end = self._key & ((1 << n * TOKEN_BITS) - 1), len(text)
            if self._length == 0 and gram in ends:
                self._source, self._length = ends[gram], n
            ends[gram] = end

    def expect(self, count: int) -> None:
        self._source, self._length = len(self._text) - count, min(EXPECTED_STRENGTH, self._longest)

    def propose(self, most: int) -> Proposal:
        """Where the text ends it goes on as if it repeated from there."""
        if self._length == 0 or most < 1:
            return NOTHING
        ids = self._text[self._source : self._source + most]
        while len(ids) < most:
            ids += ids[: most - len(ids)]
        return Proposal(tuple(ids), tuple([min(self._length + i, self._longest) for i in range(most)]))
