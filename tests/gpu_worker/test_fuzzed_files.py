"""Damaged files of weights end in load errors, soon and without much memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kernels import matmul_dense
from services.gpu_worker.weights.loader import load_weights, open_source
from services.gpu_worker.weights.source import WeightsError
from tests.gpu_worker import fuzzed_files
from tests.kernels.threads import torch_threads

NAMES = ("model.safetensors", "model.gguf")


@pytest.mark.parametrize("name", NAMES)
def test_some_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fuzzed_files.write_originals(tmp_path)
    monkeypatch.setattr(matmul_dense, "rows_are_independent", lambda weight: True)
    with torch_threads(1):
        loaded = fuzzed_files.run(tmp_path, name, 150, seed=0)
        assert 0 < loaded < 75  # damage to numbers shows nowhere, but most does


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(900)
def test_ten_thousand_damaged_files(tmp_path: Path, name: str) -> None:
    fuzzed_files.write_originals(tmp_path)
    command = [sys.executable, "-m", "tests.gpu_worker.fuzzed_files", str(tmp_path), name, "10000", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < int(done.stdout) < 5000


def test_a_name_that_is_there_twice(tmp_path: Path) -> None:
    """Of two entries of a header one would be chosen in silence."""
    fuzzed_files.write_originals(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    norm = load_file(path)["model.norm.weight"]
    entry = header[header.index(b'"model.norm.weight"') :].split(b"}")[0] + b"}"
    doubled = header[:-1] + b"," + entry + b"}"
    path.write_bytes(len(doubled).to_bytes(8, "little") + doubled + data[8 + size :])
    with pytest.raises(WeightsError, match=r"model\.norm\.weight.*twice"):
        load_weights(open_source(tmp_path))
    assert norm.shape == (32,)
