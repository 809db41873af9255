"""Each rule of the scripts holds, on the oldest and the preferred Redis, and its check fails without it."""

from __future__ import annotations

import pytest

from tests.shared import (
    rules_of_attaching,
    rules_of_commits,
    rules_of_ends,
    rules_of_leases,
    rules_of_limits,
    rules_of_membership,
    rules_of_offers,
    rules_of_placing,
    rules_of_restoring,
    rules_of_scoring,
)
from tests.shared.script_rules import Rule, without
from tests.shared.script_world import world_at

BOOKS = (
    rules_of_placing, rules_of_commits, rules_of_ends, rules_of_attaching, rules_of_leases, rules_of_limits,
    rules_of_membership, rules_of_offers, rules_of_restoring, rules_of_scoring,
)  # fmt: skip
RULES = [rule for book in BOOKS for rule in book.rules.all]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.script}: {rule.name}")


@each_rule
async def test_the_rule_holds(rule: Rule, any_redis_url: str) -> None:
    async with world_at(any_redis_url) as world:
        await rule.check(world)


@each_rule
async def test_the_check_fails_without_the_rule(rule: Rule, redis_url: str) -> None:
    async with world_at(redis_url, without(rule)) as world:
        with pytest.raises(AssertionError):
            await rule.check(world)


def test_no_two_rules_are_one() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
