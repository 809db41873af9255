"""Copies of the product with one rule taken out: a scenario that does not object to its cut proves nothing.

A cut names a function (Python, or Lua with a piece of text) that must be there, so that a cut that no longer fits the
product fails by itself.
"""

from __future__ import annotations

import ast
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

from services.modules import TREE

PACKAGES = ("shared", "services", "kernels")


@dataclass(frozen=True)
class Cut:
    """`function`: its body becomes `body`. Without: `old`, which occurs once in the file, becomes `body`."""

    path: str
    body: str
    function: str = ""
    old: str = ""

    def apply(self, tree: Path) -> None:
        file = tree / self.path
        text = file.read_text()
        if self.function:
            text = _replace_body(text, self.function, self.body)
        else:
            assert text.count(self.old) == 1, f"{self.path} has {text.count(self.old)} times {self.old!r}"
            text = text.replace(self.old, self.body)
        file.unlink()  # it may be linked to the product's
        file.write_text(text)


def sabotaged_tree(folder: Path, cuts: tuple[Cut, ...]) -> Path:
    """A copy of the product in the folder, with these cuts."""
    for package in PACKAGES:
        shutil.copytree(TREE / package, folder / package)
    for cut in cuts:
        cut.apply(folder)
    return folder


def _replace_body(text: str, name: str, body: str) -> str:
    """name: `function` or `Class.method`."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        children = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part]
        assert len(children) == 1, f"{name}: {len(children)} times {part}"
        node = children[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first, last = node.body[0], node.body[-1]
    lines = text.splitlines(keepends=True)
    new = textwrap.indent(textwrap.dedent(body).strip("\n") + "\n", " " * first.col_offset)
    assert last.end_lineno
    return "".join([*lines[: first.lineno - 1], new, *lines[last.end_lineno :]])
