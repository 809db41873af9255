"""A model that cannot be loaded: the worker says why, exits with a status of its own, and never registers."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker import __main__ as main
from services.gpu_worker.failures import EngineBroken
from services.gpu_worker.scripted_engine import ScriptedEngine
from shared.runtime import EXIT_CONFIG, EXIT_MEMORY, EXIT_MODEL
from shared.settings import (
    CommonSettings,
    DeviceSettings,
    ScriptedSettings,
    SettingsError,
    WorkerSettings,
    current_environ,
)
from tests.figures import note
from tests.gpu_worker.tiny_models import save


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save("llama", folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def shard(model: Path) -> Path:
    return model / "model.safetensors"


def truncate(model: Path) -> None:
    data = shard(model).read_bytes()
    shard(model).write_bytes(data[: len(data) // 2])


def change_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = dict(load_file(shard(model)))
    change(tensors)
    save_file(tensors, shard(model))


def drop_a_tensor(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.pop("model.norm.weight"))


def change_a_dtype(model: Path) -> None:
    change_tensors(model, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int64)}))


def change_a_shape(model: Path) -> None:
    change_tensors(model, lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:-1].clone()}))


def make_unreadable(model: Path) -> None:
    shard(model).unlink()
    shard(model).mkdir()


def write_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")


SPOILS = [truncate, drop_a_tensor, change_a_dtype, change_a_shape, make_unreadable]


def load(model: Path, **own: object) -> main.Loaded:
    return main._load(
        CommonSettings(model=str(model)), WorkerSettings.model_validate(own), DeviceSettings(), ScriptedSettings()
    )


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda f: f.__name__)
def test_files_that_cannot_be_served_are_named(spoil: Callable[[Path], None], model: Path) -> None:
    spoil(model)
    with pytest.raises(main.ModelFailure, match="cannot be served: .+") as failed:
        load(model)
    assert str(model) in str(failed.value) and "\n" not in str(failed.value)


def test_what_a_setting_is_to_blame_for_is_no_failure_of_the_model(model: Path) -> None:
    with pytest.raises(SettingsError, match="max_model_len"):
        load(model, max_model_len=1 << 20)
    write_no_json(model)
    with pytest.raises((SettingsError, main.ModelFailure), match="cannot be served"):
        load(model)


def test_an_engine_that_loads_and_cannot_compute_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "step", lambda *_: 1 / 0)
    with pytest.raises(EngineBroken, match="cannot compute"):
        load(Path("scripted"), engine="scripted")


LIMITED = """
import resource, runpy
import services.gpu_worker.engines
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))
runpy.run_module("services.gpu_worker", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("spoil", "variables", "status"),
    [
        (truncate, {}, EXIT_MODEL),
        (None, {"HEADRACE_MAX_MODEL_LEN": "100000"}, EXIT_CONFIG),
        (None, {"HEADRACE_KV_CACHE_BYTES": "2GiB"}, EXIT_MEMORY),
    ],
    ids=["files", "setting", "memory"],
)
async def test_the_exit_status_says_what_is_to_blame(
    spoil: Callable[[Path], None] | None, variables: dict[str, str], status: int, model: Path, redis_url: str
) -> None:
    if spoil is not None:
        spoil(model)
    environ = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_SERVED_MODEL_NAME": "m", "HEADRACE_MODEL": str(model)}
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIMITED, env=current_environ() | environ | variables, stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    note(exit_s=time.perf_counter() - started)
    text = (output + errors).decode()
    assert process.returncode == status, text
    assert str(model) in text and "Traceback" not in text
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("*") == [], "it has told somebody that it exists"


def test_a_whole_model_loads(whole: Path) -> None:
    engine, _, cost, *_ = load(whole, kv_cache_bytes=1 << 22)
    assert engine.info.num_blocks > 0 and cost.decode_s > 0
    assert json.loads((whole / "config.json").read_text())["vocab_size"] == engine.info.vocab_size
