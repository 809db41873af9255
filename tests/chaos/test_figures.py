"""The table of failure modes and its figures: the tests that it asks are there, and its column is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.figures import AFTER, DOC, TESTS, TREE, in_words, with_figures


@pytest.mark.parametrize("test", sorted({test for tests in TESTS.values() for test in tests}))
def test_every_test_that_is_asked_is_there(test: str) -> None:
    path, _, function = test.partition("::")
    text = (TREE / "tests" / path).read_text()
    assert not function or re.search(rf"def {function.partition('[')[0]}\(", text)
    assert "note(" in text or "play.play(" in text


def test_figures_are_put_into_words() -> None:
    notes = [{"detected_s": 0.9, "pause_s": 1.5}, {"detected_s": 1.1, "pause_s": 1.52}, {"deaths": 3.0}]
    assert in_words(iter(notes)) == "detected 0.90 to 1.1 s, pause 1.5 s, deaths 3"


def test_the_last_column_of_a_row_is_written() -> None:
    text = DOC.read_text()
    written = with_figures(text, {9: "pause 12345 s", 99: "of no row"})
    [changed] = [new for old, new in zip(text.splitlines(), written.splitlines(), strict=True) if old != new]
    assert changed.startswith("| 9 |") and changed.endswith(" | pause 12345 s |")
    assert with_figures(written, {9: "pause 12345 s"}) == written


def test_every_row_names_tests_that_are_there() -> None:
    rows = re.findall(r"^\| \d+ \|.*", DOC.read_text().partition(AFTER)[0], re.MULTILINE)
    named = {path for row in rows for path in re.findall(r"`(\w+/\w+\.py)`", row)}
    assert len(rows) == 28 and named and not [path for path in named if not Path(TREE, "tests", path).exists()]
