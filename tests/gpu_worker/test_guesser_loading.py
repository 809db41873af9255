"""What computes guesses where nobody has said anything: heads that come along, on the native engine; else nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker import __main__ as main
from services.gpu_worker import device, heads_loading
from services.gpu_worker.speculative import native_eagle
from services.gpu_worker.speculative.auto import AutoSpeculator
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.speculator import Speculator
from shared import model_source
from shared.settings import CommonSettings, DeviceSettings, ScriptedSettings, SettingsError, WorkerSettings
from tests.gpu_worker.head_models import load_tiny, published

((NAME, KNOWN),) = model_source.KNOWN.items()
EAGLE = '{"method": "eagle3"}'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small model under the default one's name, with a head for it."""
    folder = tmp_path_factory.mktemp("tiny")
    load_tiny(folder / KNOWN.file_name)
    published("eagle3", folder / KNOWN.file_name, folder / NAME)
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, to be spoilt."""
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    monkeypatch.setattr(heads_loading, "PACKAGED", copy)
    return copy


def load(folder: Path, **own: Any) -> main.Loaded:
    settings = WorkerSettings(kv_cache_bytes=4 << 20, threads=1, **own)
    common = CommonSettings(model=str(folder / KNOWN.file_name))
    return main._load(common, settings, DeviceSettings(device="cpu"), ScriptedSettings())


def test_native_kernels_guess_by_default_with_heads_that_come_along(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine, _, _, drafter = load(folder)
    assert isinstance(drafter, AutoSpeculator) and drafter.fleet is not None
    assert "speculative decoding: auto, from texts, other answers, heads" in caplog.messages
    without, _, _, nobody = load(folder, speculative_config="none")
    assert nobody is None and without.info.num_blocks > engine.info.num_blocks
    assert "speculative decoding: none" in caplog.messages


def test_another_model_guesses_from_texts_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    shutil.rmtree(folder / NAME)
    engine, _, _, drafter = load(folder)
    assert isinstance(drafter, Speculator) and drafter.fleet is not None
    assert "speculative decoding: auto, from texts, other answers" in caplog.messages
    assert engine.info.num_blocks == load(folder, speculative_config="none")[0].info.num_blocks


@pytest.mark.parametrize("own", [{"engine": "torch"}, {"model_impl": "transformers"}, {"kv_cache_dtype": "float32"}])
def test_torch_does_not_by_default_and_leaves_no_room_for_it(
    folder: Path, own: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it is found out only when the engine is loaded. Who asks for it by name has it."""
    caplog.set_level("INFO")
    engine, _, _, drafter = load(folder, **own)
    assert drafter is None and not engine.info.is_native
    assert "speculative decoding: none, since no native kernels compute" in caplog.messages
    assert not [m for m in caplog.messages if "guessing from texts alone" in m]
    assert engine.info.num_blocks == load(folder, speculative_config="none", **own)[0].info.num_blocks
    assert isinstance(load(folder, speculative_config='{"method": "auto"}', **own)[3], Speculator)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., main.Loaded]:
    """Loads for one that the CPU plays, with kernels' specifications."""
    monkeypatch.setattr(device, "interpreted", lambda: True)

    def loaded(folder: Path, config: str, **asked: Any) -> main.Loaded:
        settings = WorkerSettings(kv_cache_bytes=4 << 20, threads=1, speculative_config=config)
        common = CommonSettings(model=str(folder / KNOWN.file_name))
        return main._load(common, settings, DeviceSettings(device="cuda", **asked), ScriptedSettings())

    return loaded


def test_a_gpu_does_not_by_default_and_leaves_no_room_for_it(folder: Path, on_gpu: Callable[..., main.Loaded]) -> None:
    """Who is asked for by name guesses there, in a part of the same memory."""
    engine, _, _, drafter = on_gpu(folder, "auto")
    assert drafter is None and engine.info.on_card
    without = on_gpu(folder, "none")[0].info.num_blocks
    assert engine.info.num_blocks == without
    for config, kind in (
        ('{"method": "auto"}', AutoSpeculator), (EAGLE, ModelSpeculator),
        (f'{{"method": "draft_model", "model": "{folder / KNOWN.file_name}"}}', ModelSpeculator),
    ):  # fmt: skip
        engine, _, _, drafter = on_gpu(folder, config)
        assert isinstance(drafter, kind) and engine.info.on_card and engine.info.num_blocks < without


def test_a_head_that_is_spoilt_stops_no_gpu_that_has_not_asked_for_it(
    folder: Path, on_gpu: Callable[..., main.Loaded]
) -> None:
    truncate(folder / NAME)
    assert isinstance(on_gpu(folder, '{"method": "auto"}')[3], Speculator)
    with pytest.raises((SettingsError, main.ModelFailure), match="cannot be served"):
        on_gpu(folder, EAGLE)


def test_the_scripted_engine_does_not_by_default() -> None:
    own = WorkerSettings(engine="scripted")
    loaded = main._load(CommonSettings(model="scripted"), own, DeviceSettings(), ScriptedSettings())
    assert loaded[3] is None


def truncate(head: Path) -> None:
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:500])


def lose_weights(head: Path) -> None:
    (head / "model.safetensors").unlink()


def lose_configuration(head: Path) -> None:
    (head / "config.json").unlink()


def spoil_configuration(head: Path) -> None:
    (head / "config.json").write_text('{"hidden_size": "many"}')


@pytest.mark.parametrize("spoil", [truncate, lose_weights, lose_configuration, spoil_configuration])
def test_heads_that_cannot_be_loaded_stop_no_worker_that_has_not_asked_for_them(
    folder: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert isinstance(load(folder, speculative_config=EAGLE)[3], ModelSpeculator)
    spoil(folder / NAME)
    assert isinstance(load(folder)[3], Speculator)
    assert [r.levelname for r in caplog.records if r.message.startswith("guessing from texts alone: ")] == ["WARNING"]
    assert "speculative decoding: auto, from texts, other answers" in caplog.messages
    with pytest.raises((SettingsError, main.ModelFailure), match="cannot be served"):
        load(folder, speculative_config=EAGLE)


@pytest.mark.parametrize(
    ("error", "words"),
    [(MemoryError, "none left"), (OSError, "none left"), (RuntimeError, "DefaultCPUAllocator: can't allocate memory")],
)
def test_nor_those_for_which_the_machine_does_not_suffice(
    folder: Path, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch says so by the text of a RuntimeError."""

    def run_out(*_: Any, **__: Any) -> None:
        raise error(words)

    monkeypatch.setattr(native_eagle.NativeEagle, "__init__", run_out)
    assert isinstance(load(folder)[3], Speculator)
    assert f"guessing from texts alone: {words}" in caplog.messages
    with pytest.raises((main.ModelFailure, main.OutOfMemory)):
        load(folder, speculative_config=EAGLE)
