"""Which Redis commands and keys each service may use, as an ACL file: `python -m shared.redis_acl` prints it.

What a script may touch is limited by the rights of whoever calls it, so those of scripts are read from their text in
`shared/lua/`; what a service does besides scripts is listed here. Nobody may list keys, change the server or look into
others' connections. The passwords are not here: each is a mark where the SHA-256 digest of one belongs, so that a file
into which none has been put is refused by Redis.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from shared.scripts import prefix_of

PREFIX = prefix_of("*")
SCRIPTING = ("ping", "eval", "evalsha", "script|load")
MEMBERS = ("hgetall", "mget")  # `Records.members`, `Records.leases`, `metrics.collect`
RECORDS = ("hgetall", "hmget", "lrange", "smembers", "mget")


@dataclass(frozen=True, slots=True)
class User:
    """scripts it calls; commands and keys (with `*`) that it uses besides what the text of its scripts names."""

    name: str
    scripts: tuple[str, ...]
    commands: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def mark(self) -> str:
        return f"@{self.name}@"


LIFE = ("join", "refresh", "gone")
USERS = (
    User(
        "gateway", (*LIFE, "admit", "attach", "cancel_if", "detach", "finish", "free_key", "restore"),
        (*RECORDS, "info", "time", "xread", "xrevrange", "get", "set"),
        ("lease:*", "out:*", "metrics:*", "secret"),
    ),
    User(
        "scheduler",
        (*LIFE, "assign", "bury", "cancel_if", "condemn", "drop_lease", "finish", "forget_scheduler", "keep_dead",
         "offer", "open_queue", "plan", "requeue", "send", "take_lease"),
        (*RECORDS, "info", "scard", "time", "xread", "xreadgroup", "xautoclaim", "xrevrange", "hdel", "set"),
        ("lease:*", "inbox:*", "cache:*", "metrics:scheduler:*"),
    ),
    User(
        "cache-store", (*LIFE, "announce", "drop_lease", "plan", "send", "take_lease"),
        (*MEMBERS, "hmget", "info", "xread", "xrevrange", "set"),
        ("lease:*", "cache:*", "inbox:*", "metrics:store:*"),
    ),
    User(
        "worker", (*LIFE, "amend", "commit", "finish", "requeue", "send"),
        (*RECORDS, "info", "xread", "del", "set"),
        ("lease:worker:*", "lease:store:*", "plan:*", "inbox:*", "cache:*", "metrics:worker:*"),
    ),
    User(
        "admin",  # of people and their tools: `headrace serve`, `headrace dead`, and a look at what is there
        ("gone", "retry"),
        (*RECORDS, "info", "pttl", "scan", "type", "ttl", "exists", "xlen", "xrange", "xrevrange", "xpending"),
        ("*",),
    ),
)  # fmt: skip
BY_NAME: Mapping[str, User] = {user.name: user for user in USERS}

_FUNCTION = re.compile(r"^local function (\w+)\(", re.MULTILINE)
_CALL = re.compile(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?")
_KEY = re.compile(r"P \.\. '([a-z]+:?(?:[a-z]+:)?)'")
_WITH_SUBCOMMANDS = {"xgroup"}


@dataclass(frozen=True, slots=True)
class Touched:
    """What a piece of Lua does: commands, and keys below the prefix (`*` where the rest of the name is computed)."""

    commands: frozenset[str]
    keys: frozenset[str]


def touched_by(script: str) -> Touched:
    """By its own text and that of the functions of the prelude that it calls, or that those call."""
    lua = files("shared") / "lua"
    prelude = _functions((lua / "common.lua").read_text())
    text, seen = (lua / f"{script}.lua").read_text(), set[str]()
    while missing := {name for name in prelude if re.search(rf"\b{name}\(", text)} - seen:
        seen |= missing
        text += "".join(prelude[name] for name in missing)
    commands = {
        f"{name}|{sub}".lower() if name.lower() in _WITH_SUBCOMMANDS else name.lower()
        for name, sub in _CALL.findall(text)
    }
    keys = {f"{key}*" if key.endswith(":") else key for key in _KEY.findall(text)}
    return Touched(frozenset(commands), frozenset(keys - {"lease:*"}))  # whose lease, the user's own keys say


def _functions(prelude: str) -> dict[str, str]:
    starts = [*(m.start() for m in _FUNCTION.finditer(prelude)), len(prelude)]
    names = _FUNCTION.findall(prelude)
    return {name: prelude[starts[i] : starts[i + 1]] for i, name in enumerate(names)}


def rules(user: User) -> list[str]:
    """The words of an ACL line after the name and the password."""
    touched = [touched_by(script) for script in user.scripts]
    commands = sorted({*SCRIPTING, *user.commands, *(c for t in touched for c in t.commands)})
    keys = {""} | {*user.keys, *(k for t in touched for k in t.keys)}
    keys = {k for k in keys if not any(k != o and o.endswith("*") and k.startswith(o[:-1]) for o in keys)}
    return ["resetchannels", *(f"~{PREFIX}{key}" for key in sorted(keys)), "-@all", *(f"+{c}" for c in commands)]


def acl_file(passwords: Mapping[str, str] | None = None) -> str:
    """One line a user. None: marks for passwords.

    Nobody can connect as `default`, but Redis reads its append-only file as that user: without rights it would drop
    every transaction, which is how it keeps what a script wrote.
    """
    lines = ["user default off resetchannels ~* +@all"]
    for user in USERS:
        digest = user.mark if passwords is None else hashlib.sha256(passwords[user.name].encode()).hexdigest()
        lines.append(" ".join(["user", user.name, "on", "#" + digest, *rules(user)]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(acl_file())
