"""Nothing half-done, nothing dangerous and nothing of one particular machine stays in the repository."""

from __future__ import annotations

import ast
import re

import pytest

from tests.rules.product import ROOT, python_files, repository_files, tree_of

OWN_NAMES = "tests/rules/test_leftovers.py"  # names what it forbids
# the words are put together here, so that this file is checked like any other
NOTES = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b(?!\s*\(?#\d)")
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me)/\w")
CONFLICTS = re.compile(r"^(?:<{7}|>{7}|={7})(?: |$)", re.MULTILINE)

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "imp"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_WORDS = {"trust_remote_code", "auto_map", "allow_pickle", "cmsgpack"}


def texts() -> list[tuple[str, str]]:
    found = []
    for path in repository_files():
        data = (ROOT / path).read_bytes()
        if b"\0" not in data[:4096]:
            found.append((path, data.decode("utf-8", "replace")))
    return found


def places(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1} {match[0]}"
        for path, text in texts()
        for match in pattern.finditer(text)
    ]


def test_a_note_of_work_to_do_names_its_issue() -> None:
    assert places(NOTES) == []


def test_no_path_of_one_machine() -> None:
    assert places(MACHINE_PATHS) == []


def test_no_conflict_marker() -> None:
    assert places(CONFLICTS) == []


NAMED_ONLY = {("services/gpu_worker/model/families.py", "'auto_map'")}  # as a key that is not looked at


def dangers(tree: ast.AST) -> list[str]:
    """Ways to run what comes from outside as code: deserialisers that execute, eval, code from model folders."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"{node.lineno}: {node.func.id}()")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "yaml.load"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_WORDS:
            found.append(f"{node.value.lineno}: {node.arg}=")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FORBIDDEN_WORDS:
            found.append(f"{node.lineno}: {node.value!r}")
        found += [f"{getattr(node, 'lineno', 0)}: import {name}" for name in names if name in FORBIDDEN_IMPORTS]
    return found


@pytest.mark.parametrize("path", python_files())
def test_nothing_from_outside_is_run_as_code(path: str) -> None:
    assert [danger for danger in dangers(tree_of(path)) if (path, danger.partition(": ")[2]) not in NAMED_ONLY] == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from marshal import loads", "eval('1')", "torch.load(f)", "load(trust_remote_code=True)"],
)
def test_the_check_itself_finds_what_is_forbidden(code: str) -> None:
    assert dangers(ast.parse(code)) != []


def test_a_method_of_that_name_is_no_danger() -> None:
    assert dangers(ast.parse("model.eval()\nlua.eval_it()")) == []
