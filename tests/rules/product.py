"""The product's files and syntax trees, for the rules that are checked on all of them."""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "services", "kernels")
SOURCES = (".py", ".lua", ".c", ".h", ".html")


def product_files(suffixes: tuple[str, ...] = SOURCES) -> list[str]:
    """Paths from the root of everything that is part of the product, in order."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in suffixes]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def python_files() -> list[str]:
    return product_files((".py",))


@functools.cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse(text_of(path))


def module_of(path: str) -> str:
    """`services/cli.py` is `services.cli`; a package is named by its folder."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def repository_files() -> list[str]:
    """What is or will be in the repository: tracked files and new ones that git does not ignore."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(path for path in set(listed) if path and (ROOT / path).is_file())
