"""Fixtures of the tests of a whole stack: `fixtures.py`, which other folders use too."""

from tests.e2e.fixtures import client, connect, new_stack, shared_stack, stacks_redis, undisturbed

__all__ = ["client", "connect", "new_stack", "shared_stack", "stacks_redis", "undisturbed"]
