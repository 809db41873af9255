"""What a source of drafts is: it reads a sequence's text token by token and says how that may go on. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts, first to last. strengths: how much speaks for each, in the proposer's own measure, below KIND, and KIND
    times the number of the kind that it is of: what each kind is worth is learnt apart."""

    ids: tuple[int, ...] = ()
    strengths: tuple[int, ...] = ()


Guessed = tuple[int, bool]  # with which strength, and whether it was right
NOTHING = Proposal()
TOKEN_BITS = 32  # of a token id in a key: one whole number takes less memory than several
EXPECTED_STRENGTH = 8  # of the first token that is said to come
KIND = 128


class Proposer(Protocol):
    """One a sequence. Tell it every token, prompt first; memory grows with the text by a constant a token."""

    def read(self, ids: Seq[int]) -> None:
        """The text goes on with these, which are given."""
        ...

    def follow(self, ids: Seq[int]) -> list[Guessed]:
        """And with these, which were drawn. What it would have guessed, one token after the other."""
        ...

    def propose(self, most: int) -> Proposal:
        """At most so many drafts of what comes next."""
        ...


class TextProposer(Proposer, Protocol):
    """Looks in the text itself."""

    def expect(self, count: int) -> None:
        """The last so many tokens have not come: somebody who should know says that they come now."""
        ...
