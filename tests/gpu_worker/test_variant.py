"""What two workers must have in common to compute the same numbers on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.gpu_worker import variant
from services.gpu_worker.variant import gpu_variant


def name() -> str:
    return gpu_variant("a model", torch.device("cpu"), block_size=16, dtype=torch.float32, kv_dtype=torch.float32)


@pytest.mark.parametrize(
    "file",
    ["kernels/gpu/attention.py", "kernels/attention.py", "kernels/planar_weight.py", "kernels/routing.py",
     "gpu_worker/gpu_inputs.py", "gpu_worker/model/gpu_decoder.py", "gpu_worker/weights/on_device.py"],
)  # fmt: skip
def test_the_text_of_what_computes_counts(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, read_bytes = name(), Path.read_bytes
    changed = []

    def edited(path: Path) -> bytes:
        if not path.as_posix().endswith(f"/{file}"):
            return read_bytes(path)
        changed.append(path)
        return read_bytes(path) + b"#"

    assert name() == here
    monkeypatch.setattr(Path, "read_bytes", edited)
    assert name() != here and len(changed) == 1


def test_another_triton_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant, "version", lambda _: "3.0.0")
    here = name()
    monkeypatch.setattr(variant, "version", lambda _: "3.0.1")
    assert name() != here
