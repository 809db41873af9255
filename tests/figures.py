"""Figures that tests measure beside what they check: `note` keeps them, `python -m tests.chaos.figures` tables them.

Times are those of the machine and its company at that moment, so no test fails for them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE = Path(__file__).parents[1] / "build" / "figures.jsonl"  # a line a note, the latest last


def note(**figures: float) -> None:
    """Of the test that runs; names end in their unit (`pause_s`)."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    log.info("%s", ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("a") as file:
        file.write(json.dumps({"test": test} | {name: round(value, 3) for name, value in figures.items()}) + "\n")


def noted() -> Iterator[dict[str, Any]]:
    if FILE.exists():
        yield from map(json.loads, FILE.read_text().splitlines())
