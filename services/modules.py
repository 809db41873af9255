"""How one part of Headrace starts another: by module name, in the tree and the Python that this one runs from.

The packages have general names (`services`, `shared`), so the current folder, which may have its own, is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TREE = Path(__file__).parents[1]
# libgomp's idle threads spin for milliseconds by default. Beside any other busy process (a service, a client) they then
# hold the core that the last working thread waits for, and a step takes many times as long. Read when torch is loaded.
OPENMP = {"GOMP_SPINCOUNT": "1000"}


def command(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", module, *args]


def environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which `command` finds the module, and the engine's threads share the cores with others."""
    openmp = {} if "OMP_WAIT_POLICY" in environ else OPENMP
    path = os.pathsep.join(filter(None, [str(TREE), environ.get("PYTHONPATH", "")]))
    return {**openmp, **environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
