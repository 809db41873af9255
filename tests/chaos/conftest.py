"""Fixtures of the fault tests: those of a whole stack, and `play` / `objects` for scenarios and their twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.play import Play
from tests.e2e.clients import Answer
from tests.e2e.fixtures import connect, new_stack, shared_stack, stacks_redis, undisturbed

__all__ = ["connect", "new_stack", "play", "shared_stack", "stacks_redis", "undisturbed"]


@pytest.fixture
def play(undisturbed: list[Answer], stacks_redis: str, tmp_path: Path) -> Play:
    return Play(undisturbed, stacks_redis, tmp_path)
