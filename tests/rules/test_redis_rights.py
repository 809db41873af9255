"""A service's rights in Redis are what its code uses: the table in `shared/redis_acl.py`, and the file made from it."""

from __future__ import annotations

import ast
import inspect

import pytest

from shared import redis_acl
from shared.scripts import Scripts
from tests.rules.product import ROOT, python_files, tree_of

PACKAGES = {
    "gateway": "services/gateway/", "scheduler": "services/scheduler/", "cache-store": "services/cache_store/",
    "worker": "services/gpu_worker/", "admin": "services/tools/",
}  # fmt: skip
CLIENTS = ("redis", "_blocking", "pipe")  # how connections are called
SCRIPTS = {name for name, _ in inspect.getmembers(Scripts, inspect.iscoroutinefunction) if not name.startswith("_")}
COMMANDS = {"delete": "del"}  # where redis-py's name is another
NO_COMMANDS = {"aclose", "pipeline", "execute", "connection_pool", "register_script"}


def used(paths: list[str]) -> tuple[set[str], set[str]]:
    """(scripts, commands): methods called on what is named like the scripts or like a connection."""
    scripts, commands = set(), set()
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if node.attr in SCRIPTS and owner.endswith(("scripts", "_beat")):
                    scripts.add(node.attr)
        commands |= commands_in(tree_of(path))
    return scripts, commands


def commands_in(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner.endswith(CLIENTS) and not owner.endswith(".asyncio") and node.attr not in NO_COMMANDS:
                found.add(COMMANDS.get(node.attr, node.attr))
    return found


def files_of(prefix: str) -> list[str]:
    return [path for path in python_files() if path.startswith(prefix)]


def commands_by_function(path: str) -> dict[str, set[str]]:
    return {
        f.name: commands_in(f) for f in ast.walk(tree_of(path)) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def read_by(name: str) -> set[str]:
    """Commands of those functions in `shared/` that it calls: `records.readers(...)`, `metrics.publish(...)`."""
    found = set()
    for module in ("records", "metrics"):
        functions = commands_by_function(f"shared/{module}.py")
        for path in files_of(PACKAGES[name]):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(module):
                    found |= functions.get(node.attr, set())
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_a_service_may_run_the_scripts_that_it_calls(name: str) -> None:
    own, _ = used(files_of(PACKAGES[name]))
    common, _ = used(files_of("shared/"))
    listed = set(redis_acl.BY_NAME[name].scripts)
    assert own - listed == set()
    if name == "admin":
        own.add("gone")  # `serve` says it for a child
    assert listed - own - common == set()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_service_may_use_the_commands_that_it_uses(name: str) -> None:
    _, own = used(files_of(PACKAGES[name]))
    _, common = used(files_of("shared/"))
    listed = set(redis_acl.BY_NAME[name].commands)
    assert (own | read_by(name)) - listed == set()
    if name == "admin":
        return  # people look by hand too
    assert listed - own - common == set()


def test_the_file_of_the_deployment_is_made_from_the_table() -> None:
    text = (ROOT / "deploy/redis/users.acl").read_text()
    assert text == redis_acl.acl_file(), "run `make docs`"


def test_nobody_may_list_keys_or_change_the_server() -> None:
    forbidden = {"keys", "config", "debug", "flushall", "flushdb", "client", "acl", "shutdown", "monitor", "save",
                 "replicaof", "module", "script", "function", "migrate", "restore", "select", "publish"}  # fmt: skip
    for user in redis_acl.USERS:
        allowed = {word[1:] for word in redis_acl.rules(user) if word.startswith("+")}
        assert not allowed & forbidden and not any(word.startswith("@") for word in allowed), user.name
