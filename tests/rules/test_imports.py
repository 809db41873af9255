"""Who may import whom. A service knows the others by their messages alone; only the worker has an engine.

Allowed third-party packages and allowed parts of the product, by the longest matching prefix of a module's name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.rules.product import PACKAGES, module_of, python_files, text_of, tree_of


@dataclass(frozen=True)
class Allowed:
    third_party: frozenset[str]
    ours: tuple[str, ...]


def allowed(third_party: str, *ours: str) -> Allowed:
    return Allowed(frozenset(third_party.split()), ours)


MESSAGING = "redis msgpack pydantic prometheus_client"
TABLE = {
    "shared": allowed(f"{MESSAGING} hiredis", "shared"),
    "kernels": allowed("torch", "kernels"),
    "kernels.aot": allowed("triton", "kernels"),
    "kernels.gpu": allowed("torch triton", "kernels"),
    "services.gateway": allowed(f"{MESSAGING} aiohttp tokenizers jinja2 llguidance", "shared", "services.gateway"),
    "services.scheduler": allowed(MESSAGING, "shared", "services.scheduler"),
    "services.cache_store": allowed(MESSAGING, "shared", "services.cache_store"),
    "services.gpu_worker": allowed(
        f"{MESSAGING} torch safetensors numpy transformers tqdm llguidance", "shared", "kernels", "services.gpu_worker"
    ),
    "services.tools": allowed(f"{MESSAGING} aiohttp tqdm", "shared", "services.tools", "services.model_download"),
    # the command itself: it starts services by name and never imports one
    "services": allowed(
        f"{MESSAGING} tqdm", "shared", "services.banner", "services.cli", "services.console", "services.model_download",
        "services.modules", "services.serve", "services.supervisor",
    ),
}  # fmt: skip
LAZY_ONLY = {"transformers"}  # slow to import, and needed by one fallback

FORBIDDEN_IN_PURE = {"asyncio", "redis", "time", "random", "secrets", "socket", "subprocess", "threading"}

CLOCKS = {"now", "today", "utcnow"}  # of datetime, whose values may come in as arguments


def imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full dotted name); `from a import b` counts as a.b where that may be a module, which a prefix covers."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            yield from ((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)


def rule_of(module: str) -> Allowed:
    prefixes = [name for name in TABLE if module == name or module.startswith(name + ".")]
    return TABLE[max(prefixes, key=len)]


def violations(path: str, tree: ast.AST) -> list[str]:
    rule = rule_of(module_of(path))
    found = []
    for line, name in imports(tree):
        top = name.partition(".")[0]
        if top in PACKAGES:
            fine = any((name + ".").startswith(ours + ".") for ours in rule.ours)
        else:
            fine = top in rule.third_party or top in sys.stdlib_module_names
        if not fine:
            found.append(f"{path}:{line} imports {name}")
    return found


def lazy_lines(tree: ast.AST) -> set[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for function in functions for line, _ in imports(function)}


def is_pure(path: str) -> bool:
    return "*Pure.*" in (ast.get_docstring(tree_of(path)) or "")


@pytest.mark.parametrize("path", python_files())
def test_imports_are_those_of_the_table(path: str) -> None:
    assert violations(path, tree_of(path)) == []


@pytest.mark.parametrize("path", [path for path in python_files() if is_pure(path)])
def test_a_pure_file_has_no_clock_no_chance_and_no_connection(path: str) -> None:
    used = {name.partition(".")[0] for _, name in imports(tree_of(path))}
    assert used & FORBIDDEN_IN_PURE == set()
    attributes = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    assert attributes & CLOCKS == set()


def test_a_lazy_import_says_why() -> None:
    lines = [(path, line, text_of(path).splitlines()[line - 1]) for path in python_files()
             for line in sorted(lazy_lines(tree_of(path)))]  # fmt: skip
    assert [f"{path}:{line} {text.strip()}" for path, line, text in lines if "#" not in text] == []


def test_slow_packages_are_imported_only_where_they_are_used() -> None:
    early = [
        f"{path}:{line} {name}"
        for path in python_files()
        for line, name in imports(tree_of(path))
        if name.partition(".")[0] in LAZY_ONLY and line not in lazy_lines(tree_of(path))
    ]
    assert early == []


def test_the_environment_is_read_in_one_file() -> None:
    # the download hands its own environment on to pip; Triton has a switch of its own, which tests set
    exempt = {"shared/settings.py", "shared/model_source.py", "kernels/dispatch.py"}
    readers = {
        path
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
        and isinstance(node.value, ast.Name) and node.value.id == "os"
    }  # fmt: skip
    assert readers - exempt == set()


def test_kernels_is_only_a_docstring() -> None:
    # transformers looks for a package of this name and acts on what it finds in it
    assert len(tree_of("kernels/__init__.py").body) == 1 and ast.get_docstring(tree_of("kernels/__init__.py"))


def test_the_check_itself_finds_what_is_forbidden() -> None:
    code = "import torch\nfrom services.scheduler import core\nfrom shared.protocol import Member\nimport json\n"
    assert violations("services/gateway/app.py", ast.parse(code)) == [
        "services/gateway/app.py:1 imports torch",
        "services/gateway/app.py:2 imports services.scheduler.core",
    ]
    assert violations("services/cli.py", ast.parse("import services.gateway.app")) != []
    assert violations("services/gpu_worker/engine.py", ast.parse("import aiohttp")) != []
