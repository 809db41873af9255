"""Stop strings in text that comes in pieces, against a search of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stop_matcher import Match, StopMatcher
from tests.helpers import bounded_work

TEXT = st.text("ab\n", max_size=6)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def search(before: str, piece: str, stops: tuple[str, ...]) -> Match | None:
    """Of all places where a stop string ends in the piece, the one that begins first, then the shortest."""
    whole = before + piece
    found = [
        (start, len(stop), stop)
        for stop in stops
        for start in range(len(whole))
        if whole.startswith(stop, start) and start + len(stop) > len(before)
    ]
    return Match(min(found)[0], min(found)[2]) if found else None


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(st.lists(TEXT, max_size=6), STOPS)
def test_agrees_with_a_search_of_the_whole_text(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher, before = StopMatcher(stops), ""
    for piece in pieces:
        assert matcher.push(piece) == search(before, piece, stops)
        before += piece
        assert matcher.num_held == longest_beginning(before, stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("b c d",), ["a", " b", " c", " d"], Match(2, "b c d")),
        (("b c d",), ["zb", " c", " dq"], Match(1, "b c d")),
        (("\n\n",), ["x\n", "\n"], Match(1, "\n\n")),
        (("\n\n",), ["x", "\n\n"], Match(1, "\n\n")),
        (("cd", "bcd"), ["abcd"], Match(1, "bcd")),  # both end here, the one that begins first wins
        (("c", "bcde"), ["abc"], Match(2, "c")),
    ],
)
def test_stop_strings_over_pieces(stops: tuple[str, ...], pieces: list[str], expected: Match) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(p) for p in pieces][-1] == expected


def test_hostile_stop_strings_cost_linear_time() -> None:
    stops = tuple("a" * (256 - i) + "b" for i in range(16))
    with bounded_work(2):
        matcher = StopMatcher(stops)
        for _ in range(500):
            matcher.push("a" * 10)
    assert matcher.num_held == 256
