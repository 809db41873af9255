"""Figures that tests measure beside what they check: `note` keeps them, `python -m tests.chaos.figures` tables them.

Times are those of the machine and its company at that moment: a test fails for one only where a bound is promised.
They are kept where HEADRACE_FIGURES names a file.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "HEADRACE_FIGURES"


def note(**figures: float) -> None:
    """Of the test that runs; names end in their unit (`pause_s`)."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    log.info("%s", ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    if figures and VARIABLE in os.environ:
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(json.dumps({"test": test} | {name: round(value, 3) for name, value in figures.items()}) + "\n")
