"""A draft as a value: every tree, by properties that hold for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.speculative.draft import NO_DRAFT, ROOT, Draft, chain

IDS = st.integers(0, 3)  # so few that siblings are equal now and then


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    ids = draw(st.lists(IDS, max_size=12))
    return Draft(tuple(ids), tuple(draw(st.integers(ROOT, i - 1)) for i in range(len(ids))))


@given(drafts())
def test_a_path_goes_from_the_root_by_parents(draft: Draft) -> None:
    for place, depth in enumerate(draft.depths):
        path = draft.path(place)
        assert len(path) == depth + 1 and path[-1] == place and path == sorted(path)
        assert [draft.parents[p] for p in path] == [ROOT, *path[:-1]]
        assert draft.ids_to(place) == [draft.ids[p] for p in path]
    assert draft.path(ROOT) == draft.ids_to(ROOT) == []


@given(drafts(), st.lists(IDS, max_size=6))
def test_what_is_followed_is_a_longest_way_down_that_equals_the_tokens(draft: Draft, token_ids: list[int]) -> None:
    """Of siblings that are equal the first is taken, so one is not always the longest of all."""
    places = draft.follow(token_ids)
    assert draft.ids_to(places[-1] if places else ROOT) == token_ids[: len(places)]
    assert draft.path(places[-1] if places else ROOT) == places
    if len(places) < len(token_ids):
        last = places[-1] if places else ROOT
        beside = [draft.ids[i] for i, parent in enumerate(draft.parents) if parent == last]
        assert token_ids[len(places)] not in beside


@given(drafts())
def test_each_path_of_a_tree_without_equal_siblings_is_found_by_its_tokens(draft: Draft) -> None:
    children = list(zip(draft.parents, draft.ids, strict=True))
    if len(set(children)) == len(children):
        for place in range(len(draft)):
            assert draft.follow(draft.ids_to(place)) == draft.path(place)


@given(st.lists(IDS, max_size=8), st.lists(IDS, max_size=8))
def test_a_chain_is_followed_as_far_as_it_is_equal(ids: list[int], token_ids: list[int]) -> None:
    draft = chain(ids)
    count = next(
        (i for i, (a, b) in enumerate(zip(ids, token_ids, strict=False)) if a != b), min(len(ids), len(token_ids))
    )
    assert draft.is_chain and draft.depths == list(range(len(ids))) and draft.follow(token_ids) == list(range(count))


@given(drafts(), st.integers(0, 12))
def test_the_first_of_a_draft_are_one(draft: Draft, count: int) -> None:
    first = draft.first(count)
    assert len(first) == min(count, len(draft)) and first.depths == draft.depths[:count]


def test_what_is_no_tree_is_refused() -> None:
    for ids, parents in (((1,), ()), ((1,), (0,)), ((1, 2), (-1, 1)), ((1,), (-2,)), ((), (-1,))):
        with pytest.raises(ValueError, match="no tree"):
            Draft(ids, parents)
    assert not NO_DRAFT and NO_DRAFT.is_chain and len(chain([5, 6])) == 2
