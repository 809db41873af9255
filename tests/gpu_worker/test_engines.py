"""Which engine a model gets where there is a GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker import engines
from services.gpu_worker.device import DeviceOptions
from services.gpu_worker.engines import load_engine
from services.gpu_worker.gpu_memory import GIB, Budget
from services.gpu_worker.model.config import ConfigError
from tests.kernels.threads import torch_threads

SMALL = Budget(total=24 * GIB, free=23 * GIB, share=0.9)


def refuse(*_: Any, **__: Any) -> None:
    SMALL.check_weights(40 * GIB)


def run_out(*_: Any, **__: Any) -> None:
    raise MemoryError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("load", "reason"),
    [(refuse, "the weights alone take 40.0 GiB"), (run_out, "the GPU's memory does not suffice: CUDA error")],
)
def test_a_card_that_is_too_small_is_an_error_only_where_a_card_is_asked_for(
    load: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines.GpuEngine, "load", load)
    monkeypatch.setattr(engines, "_on_cpu", lambda *_: "a CPU's engine")

    def chosen(needs_device: bool) -> object:
        with torch_threads(1):
            return load_engine(
                "auto", tmp_path, tmp_path, num_threads=1, device=torch.device("cpu"), needs_device=needs_device
            )

    with pytest.raises(ConfigError, match=reason):
        chosen(needs_device=True)
    with caplog.at_level(logging.WARNING):
        assert chosen(needs_device=False) == "a CPU's engine"
    assert "computing on the CPU: " in caplog.text and reason in caplog.text


def test_a_cpus_threads_are_given_back_once_a_card_has_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded_by = []
    monkeypatch.setattr(engines, "CudaCard", lambda _: None)
    monkeypatch.setattr(engines, "CudaRecorder", lambda: None)
    monkeypatch.setattr(engines.GpuEngine, "load", lambda *_, **__: loaded_by.append(torch.get_num_threads()) or "it")
    with torch_threads(1):
        assert load_engine("auto", tmp_path, tmp_path, num_threads=2, device=torch.device("cuda")) == "it"
        assert loaded_by == [2] and torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("options", "graphs", "fast"),
    [(DeviceOptions(), True, False), (DeviceOptions("float16", enforce_eager=True, deterministic=False), False, True)],
)
def test_a_card_computes_as_it_is_told(
    options: DeviceOptions, graphs: bool, fast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(engines, "CudaCard", lambda _: None)
    monkeypatch.setattr(engines, "CudaRecorder", lambda: "a recorder")
    monkeypatch.setattr(engines.GpuEngine, "load", lambda *_, **settings: told.update(settings) or "it")
    with torch_threads(1):
        load_engine("auto", tmp_path, tmp_path, num_threads=1, device=torch.device("cuda"), options=options)
    assert told["recorder"] == ("a recorder" if graphs else None)
    assert (told["dtype"], told["fast"]) == (options.dtype, fast)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_type_for_a_gpu_is_refused_where_a_cpu_computes(
    model_impl: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines.GpuEngine, "load", run_out)
    for device in (None, torch.device("cpu")):
        with pytest.raises(ConfigError, match="dtype: bfloat16 is a GPU's"), torch_threads(1):
            load_engine(
                "auto", tmp_path, tmp_path, num_threads=1, device=device, model_impl=model_impl,
                options=DeviceOptions("bfloat16"),
            )  # fmt: skip
