"""The command for a GPU runs where there is none, with kernels' specifications and with the kernels interpreted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.settings import current_environ


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_all_of_it_runs_at_tiny_sizes(interpreted: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.gpu", str(tmp_path), "--tiny"]
    environ = current_environ() | {"TRITON_INTERPRET": interpreted}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert rows[0]["what"] == "ceilings" and not any(row.get("failed") for row in rows)
    named = " ".join(row["what"] for row in rows)
    for what in ("rms_norm", "matmul int4", "attention draft of 8", "draw top-p", "decode, batch", "alone and among"):
        assert what in named and what in done.stdout
