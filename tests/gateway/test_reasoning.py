"""Thoughts and answers are told apart however the text is cut."""

from __future__ import annotations

import pytest

from services.gateway import reasoning
from services.gateway.reasoning import ReasoningSplitter
from tests.gateway.test_tool_parser import cuts


def read(pieces: list[str], begun: bool, name: str = "deepseek_r1") -> tuple[str, str]:
    splitter = ReasoningSplitter(reasoning.BY_NAME[name], begun)
    found = [splitter.push(piece, last=i == len(pieces)) for i, piece in enumerate([*pieces, ""])]
    return "".join(t for t, _ in found), "".join(a for _, a in found)


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "answer"),
    [
        ("<think>\nWell, 1 < 2.\n</think>\n\nYes.\n", False, "Well, 1 < 2.", "Yes.\n"),
        ("Well.</think>Yes </think>.", True, "Well.", "Yes </think>."),
        ("\n <think>a  b</think>", False, "a  b", ""),
        ("<think></think>\nYes.", False, "", "Yes."),
        ("Just <think> an answer", False, "", "Just <think> an answer"),
        ("  <thin", False, "", "  <thin"),
        ("no end </thin", True, "no end </thin", ""),
        ("", True, "", ""),
        (" ", False, "", " "),
    ],
)
def test_thoughts_and_answers(text: str, begun: bool, thoughts: str, answer: str) -> None:
    for pieces in ([text], list(text), *(cuts(text, seed) for seed in range(40))):
        assert read(pieces, begun) == (thoughts, answer), pieces


@pytest.mark.parametrize(
    ("text", "begun", "num_chars"),
    [("<think>ab</think>\nyes", False, 17), ("ab</think>yes", True, 10), ("<think>ab", False, 9), ("yes", False, 0),
     ("<th", False, 0), ("", True, 0), (" <think></think>x</think>", False, 16)],
)  # fmt: skip
def test_how_much_of_a_text_is_thoughts(text: str, begun: bool, num_chars: int) -> None:
    for pieces in ([text], list(text), *(cuts(text, seed) for seed in range(20))):
        splitter = ReasoningSplitter(reasoning.BY_NAME["deepseek_r1"], begun)
        for piece in [*pieces, ""]:
            splitter.push(piece)
        assert splitter.num_chars == num_chars, pieces


def test_formats_are_known_by_their_template() -> None:
    for row in reasoning.FORMATS:
        assert reasoning.of_template(f"{{{{ content.split('{row.end}')[-1] }}}}") == row
        assert read([f"{row.start} hm {row.end} yes"], False, row.name) == ("hm", "yes")
    assert reasoning.of_template("{{ messages }}") is None
