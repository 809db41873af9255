"""A draft: guesses of the next tokens, each behind the sequence's last token or behind another guess. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

ROOT = -1  # the sequence's last token, in the place of a parent


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree, of which a chain is one kind. parents: of each token the place of the one it follows, which stands
    before it. So the first tokens of a draft are one too."""

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ids) or not all(ROOT <= p < i for i, p in enumerate(self.parents)):
            raise ValueError(f"no tree of {len(self.ids)} tokens: {self.parents}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == place - 1 for place, parent in enumerate(self.parents))

    @property
    def depths(self) -> list[int]:
        """Of each token, how many are before it in the draft: its position, counted from the first guess's."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, place: int) -> list[int]:
        """Places of the tokens up to this one, the first first; of the root none."""
        places = []
        while place != ROOT:
            places.append(place)
            place = self.parents[place]
        return places[::-1]

    def ids_to(self, place: int) -> list[int]:
        return [self.ids[p] for p in self.path(place)]

    def follow(self, token_ids: Iterable[int]) -> list[int]:
        """Places of the guesses that these tokens, one after the other, make right."""
        places, place = [], ROOT
        for token_id in token_ids:
            place = self.child(place, token_id)
            if place == ROOT:
                break
            places.append(place)
        return places

    def child(self, place: int, token_id: int) -> int:
        """Place of the guess that this token follows here; ROOT if there is none."""
        for i in range(place + 1, len(self.ids)):
            if self.parents[i] == place and self.ids[i] == token_id:
                return i
        return ROOT

    def first(self, count: int) -> Draft:
        return Draft(self.ids[:count], self.parents[:count])


NO_DRAFT = Draft()


def chain(token_ids: Seq[int]) -> Draft:
    """Each token behind the one before."""
    return Draft(tuple(token_ids), tuple(range(ROOT, len(token_ids) - 1))) if token_ids else NO_DRAFT
