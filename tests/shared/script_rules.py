"""What a rule of the scripts is: the text in the Lua source that keeps it, and a check that fails without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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
            source = super().source(name)
            if rule.script not in ("common", name):
                return source
            assert source.count(rule.text) == 1, f"{rule.text!r} is not in {rule.script}.lua once"
            return source.replace(rule.text, rule.removed)

    return Mutilated
