"""A container's health check: `python -m services.tools.health URL_OR_FILE`; exit status 0 is healthy.

A URL must answer 200; a file (HEADRACE_HEARTBEAT_FILE) must have been touched lately, which only a running event loop
does. It runs every few seconds, so it imports nothing slow and reads no settings.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

MAX_AGE_S = 20.0  # four missed touches
TIMEOUT_S = 5.0


def why_unhealthy(target: str, now_s: float) -> str:
    """Empty if healthy."""
    try:
        if target.startswith("http"):
            with urllib.request.urlopen(target, timeout=TIMEOUT_S) as response:
                return "" if response.status == 200 else f"{target} answered {response.status}"
        age_s = now_s - os.stat(target).st_mtime
    except (OSError, urllib.error.URLError) as e:
        return f"{target}: {e}"
    return "" if age_s <= MAX_AGE_S else f"{target} was touched {age_s:.0f} s ago"


def main(args: Sequence[str]) -> int:
    problem = why_unhealthy(args[0], time.time())
    if problem:
        sys.stderr.write(f"{problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
