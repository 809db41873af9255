from __future__ import annotations

import pytest

from services.gpu_worker.training.prompts import built_in, parse


def test_built_in_ones_follow_from_the_seed_and_differ() -> None:
    assert built_in(50, 1) == built_in(50, 1) != built_in(50, 2)
    found = built_in(300, 0)
    assert len({str(p) for p in found}) > 280
    assert any(isinstance(p, str) for p in found) and any(isinstance(p, list) for p in found)
    assert not any("{" in str(p).replace("{'", "") for p in found), "a place was left open"


def test_lines_are_text_or_json() -> None:
    assert parse('Hello\n\n{"prompt": "Once"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n') == [
        [{"role": "user", "content": "Hello"}], "Once", [{"role": "user", "content": "Hi"}],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, named",
    [("", "no prompt"), ("a\n{", "line 2"), ('{"prompt": 3}', "line 1"), ('{"messages": []}', "line 1"),
     ('{"messages": [{"role": "user"}]}', "line 1")],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_with_its_line(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(text)
