"""Triton's driver: what it needs before it can launch anything."""

from __future__ import annotations

import triton


def start_driver() -> None:
    """Compiles its helpers, unless they are cached. Raises whatever the compiler or the cache's folder has to say."""
    triton.runtime.driver.active.get_current_target()
