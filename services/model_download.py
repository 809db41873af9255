"""Getting a model before it is served, with a progress bar where somebody watches."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from shared import model_source
from shared.model_source import ModelSource


def fetch_model(spec: str, cache_dir: Path) -> ModelSource:
    """The model's files, downloaded if they are not there yet; ModelSourceError if they cannot be had."""
    bar: tqdm | None = None

    def show(num_done: int, num_total: int) -> None:
        nonlocal bar
        if bar is None:
            if not sys.stderr.isatty():
                sys.stderr.write(f"Downloading {spec} ({num_total / 1e6:.0f} MB)\n")
            bar = tqdm(desc=f"Downloading {spec}", total=num_total or None, unit="B", unit_scale=True, disable=None)
        bar.update(num_done - bar.n)

    try:
        return model_source.resolve(spec, cache_dir, show)
    finally:
        if bar is not None:
            bar.close()
