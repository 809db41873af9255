"""Block managers whose invariants are checked after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cache_store.numbered import Numbered


@pytest.fixture
def make_calls() -> Iterator[Callable[[int], Numbered]]:
    made: list[Numbered] = []

    def make(num_blocks: int) -> Numbered:
        made.append(Numbered(num_blocks))
        return made[-1]

    yield make
    for calls in made:
        calls.manager.check_invariants()


@pytest.fixture
def calls(make_calls: Callable[[int], Numbered]) -> Numbered:
    """A pool of 16 blocks of 4 tokens."""
    return make_calls(16)
