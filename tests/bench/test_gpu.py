"""The command for a GPU runs where there is none, with kernels' specifications and with the kernels interpreted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.settings import current_environ
from tests.bench.gpu import Row, collected


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
    for what in (
        "rms_norm", "matmul int4", "matmul fp8", "attention draft of 8", "draw top-p", "decode, batch",
        "alone and among", "cuBLAS", "SDPA", "8 rows, batch",
        "guesses: the model itself drafts", "guesses: eagle3", "guesses: medusa", "speculation ngram",
        "speculation auto", "stack, 8 at a time",
    ):  # fmt: skip
        assert what in named and what in done.stdout
    assert (tmp_path / "gpu.md").read_text().count("\n| ") == len(rows) + 1


def test_a_section_that_fails_or_comes_too_late_costs_no_other() -> None:
    def fails() -> Iterator[Row]:
        yield {"what": "before"}
        raise RuntimeError("no such card\nand more")

    rows = collected([("a", lambda: [{"what": "one"}]), ("b", fails)], 1.0)
    assert rows == [
        {"what": "one"}, {"what": "before"}, {"what": "b", "failed": True, "note": "RuntimeError: no such card"},
    ]  # fmt: skip
    assert collected([("a", fails)], 0.0) == [{"what": "a", "note": "left out: the time was over"}]
