"""SECURITY.md names tests that there are, for each of the rules S1 to S18."""

from __future__ import annotations

import ast
import re

import pytest

from tests.rules.product import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", TEXT))))
def test_a_test_that_is_named_is_there(named: str) -> None:
    path, _, name = named.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not name or name in functions


def test_every_rule_is_there() -> None:
    rules = TEXT.partition("| rule | test |")[2]
    assert {int(n) for n in re.findall(r"\bS(\d+)\b", rules)} == set(range(1, 19))
