"""The device of a worker: what is said where there is no GPU, and that one is taken where there is."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.gpu_worker.device import choose_device
from shared.settings import SettingsError

NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU.\n"


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), error: str = "", triton_error: str = ""
) -> None:
    """A torch with CUDA, and a card unless there is an error."""
    import triton  # not before others have had it interpret

    def init() -> None:
        if error:
            raise RuntimeError(error)

    def get_current_target() -> None:
        if triton_error:
            raise RuntimeError(triton_error)

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=get_current_target))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def refusal() -> str:
    with pytest.raises(SettingsError) as caught:
        choose_device("cuda")
    return str(caught.value)


def test_a_card_is_taken_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch)
    assert choose_device("cuda") == choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cpu") is None


def test_who_asks_for_a_cpus_engine_gets_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch)
    assert choose_device("auto", "native") is None
    with pytest.raises(SettingsError, match="engine: torch computes on a CPU, and device is cuda"):
        choose_device("cuda", "torch")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"error": NO_DRIVER}, "Found no NVIDIA driver on your system"),
        ({"error": "No CUDA GPUs are available"}, "No CUDA GPUs are available"),
        ({"capability": (7, 5)}, "Tesla T4 is too old: kernels are made for compute capability 8.0 and later"),
        ({"triton_error": "Failed to find C compiler"}, "Triton cannot be used here: Failed to find C compiler"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: dict[str, Any], sentence: str
) -> None:
    card(monkeypatch, **what)
    assert refusal() == f"device: cuda is not possible here: {sentence} (set by --device or HEADRACE_DEVICE)"
    with caplog.at_level(logging.INFO):
        assert choose_device("auto") is None
    assert caplog.messages == [f"computing on the CPU: {sentence}"]


def test_a_torch_without_cuda_is_told_from_a_machine_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"torch {torch.__version__} is built without CUDA" in refusal()


def test_triton_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in refusal()


def test_where_kernels_are_interpreted_the_cpu_plays_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_device("cuda") == torch.device("cpu")
