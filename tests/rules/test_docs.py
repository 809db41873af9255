"""The documents tell the truth: settings and commands are those of the code, the file map is the tree, links work.

The file map stands in ARCHITECTURE.md under the heading `## File map`, up to the next heading of that level. Its
paths are the back-quoted names in the first cell of each table row, from the root of the repository, with `*` for
files that one row describes together: | `shared/bus.py` | connections to Redis |
"""

from __future__ import annotations

import ast
import fnmatch
import re

import pytest

from services.reference import document
from shared.settings import ALL_SECTIONS
from tests.rules.product import ROOT, product_files, python_files, repository_files, tree_of

FILE_MAP = "## File map"
# of these only the default is accepted until they do something
NOT_READ_AS_FIELDS = {
    "kv_cache_dtype", "quantization", "scheduling_policy", "tensor_parallel_size",
}  # fmt: skip


def test_settings_md_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == document(), "run `make docs`"


def test_every_setting_is_used() -> None:
    read = {node.attr for path in python_files() for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    fields = {field for section in ALL_SECTIONS for field in section.model_fields}
    assert fields - read - NOT_READ_AS_FIELDS == set()


def mapped_patterns(text: str) -> list[str]:
    _, _, rest = text.partition(f"\n{FILE_MAP}\n")
    section = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]


def differences(patterns: list[str], files: list[str]) -> list[str]:
    """Files that no row names, and rows that name no file. A `*` stands for one part of a path."""

    def names(pattern: str, file: str) -> bool:
        return pattern.count("/") == file.count("/") and fnmatch.fnmatchcase(file, pattern)

    unnamed = [file for file in files if not any(names(pattern, file) for pattern in patterns)]
    untrue = [pattern for pattern in patterns if not any(names(pattern, file) for file in files)]
    return [f"not in the map: {file}" for file in unnamed] + [f"in the map only: {pattern}" for pattern in untrue]


def test_the_file_map_is_the_tree() -> None:
    files = [file for file in product_files() if not file.endswith("__init__.py")]
    assert differences(mapped_patterns((ROOT / "ARCHITECTURE.md").read_text()), files) == []


def test_the_check_of_the_map_finds_what_is_missing_and_what_is_untrue() -> None:
    text = "# A\n| `x.py` | elsewhere |\n\n## File map\n\n| file | what |\n|---|---|\n"
    text += "| `a/b.py`, `a/c.py` | uses `d.py` |\n| `a/lua/*.lua` | scripts |\n\n## Next\n| `y.py` | |\n"
    assert mapped_patterns(text) == ["a/b.py", "a/c.py", "a/lua/*.lua"]
    found = differences(mapped_patterns(text), ["a/b.py", "a/e.py", "a/lua/x.lua", "a/lua/old/y.lua"])
    assert found == ["not in the map: a/e.py", "not in the map: a/lua/old/y.lua", "in the map only: a/c.py"]


@pytest.mark.parametrize("path", [path for path in repository_files() if path.endswith(".md")])
def test_links_between_documents_work(path: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / path).read_text(), flags=re.DOTALL)
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", t)]
    assert [target for target in targets if target and not ((ROOT / path).parent / target).exists()] == []


def test_every_kind_of_fault_has_tests() -> None:
    rows = [row for row in (ROOT / "docs" / "faults.md").read_text().splitlines() if row.startswith("|")][2:]
    assert len(rows) == 20
    for row in rows:
        names = re.findall(r"`(tests/\S+?\.py)::(\w+)`", row)
        assert names, row
        for path, name in names:
            functions = [n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(n, "name")]
            assert name in functions, f"{path}::{name}"
