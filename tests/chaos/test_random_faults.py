"""Faults at random, from a seed, under constant load (`random_run.py`); `make chaos` does the same for longer."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest

from tests.chaos.random_run import RandomRun
from tests.chaos.schedule import faults

log = logging.getLogger(__name__)


def test_a_seed_repeats_its_schedule() -> None:
    first = [list(itertools.islice(faults(seed), 200)) for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]


async def run(folder: Path, seed: int, seconds: float) -> None:
    random_run = RandomRun(folder, seed)
    try:
        report = await random_run.run(seconds)
    finally:
        log.info("\n".join(random_run.report.lines()))
    assert sum(n for what, n in report.answers.items() if what.startswith("whole")) > seconds  # it was not all refused


@pytest.mark.timeout(120)
async def test_every_answer_is_the_one_it_always_is(tmp_path: Path) -> None:
    await run(tmp_path, seed=7, seconds=15)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 5))
async def test_every_answer_is_the_one_it_always_is_for_longer(seed: int, tmp_path: Path) -> None:
    await run(tmp_path, seed, seconds=60)
