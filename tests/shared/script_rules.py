"""What a rule of the scripts is: the text in the Lua source that keeps it, and a check that fails without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files

from shared.scripts import Scripts
from tests.shared.script_world import World

Check = Callable[[World], Awaitable[None]]


@dataclass(frozen=True)
class Rule:
    """script: the one whose source has the text, or `common`. removed: what stands there when the rule is gone."""

    name: str
    script: str
    text: str
    removed: str
    check: Check


class RuleBook:
    """Collects rules: `@rules.rule(name, script, text, removed)` above each check."""

    def __init__(self) -> None:
        self.all: list[Rule] = []

    def rule(self, name: str, script: str, text: str, removed: str = "") -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            self.all.append(Rule(name, script, text, removed, check))
            return check

        return add


def without(rule: Rule) -> type[Scripts]:
    """The scripts as they would be without the rule."""

    class Mutilated(Scripts):
        def source(self, name: str) -> str:
            source, prelude = super().source(name), (files("shared") / "lua" / "common.lua").read_text()
            if rule.script not in ("common", name):
                return source
            own = source.removeprefix(prelude)
            if (prelude if rule.script == "common" else own).count(rule.text) != 1:
                # no AssertionError: the check has to fail for the rule's sake
                raise LookupError(f"{rule.text!r} is not in {rule.script}.lua once")
            if rule.script == "common":
                return prelude.replace(rule.text, rule.removed) + own
            return prelude + own.replace(rule.text, rule.removed)

    return Mutilated
