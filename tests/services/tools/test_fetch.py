"""`headrace fetch` and the progress that it shares with `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services import model_download
from services.tools import fetch
from shared.model_source import ModelSource, ModelSourceError, Progress


def test_it_prints_where_the_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    assert fetch.main([str(model)]) == 0
    assert fetch.main(["--model", str(model)]) == 0
    assert capsys.readouterr().out == f"tiny: {model}\n" * 2


def test_the_environment_names_the_model_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, Path]] = []

    def resolve(spec: str, cache_dir: Path, progress: Progress) -> ModelSource:
        seen.append((spec, cache_dir))
        return ModelSource("m", cache_dir / "m.gguf", "gguf")

    monkeypatch.setattr("shared.model_source.resolve", resolve)
    monkeypatch.setenv("HEADRACE_MODEL", "hf:a/b")
    assert fetch.main(["--cache-dir", str(tmp_path)]) == 0
    assert fetch.main(["other"]) == 0
    assert seen[0] == ("hf:a/b", tmp_path) and seen[1][0] == "other"


def test_the_scripted_engine_needs_no_files() -> None:
    assert fetch.main(["scripted"]) == 0


def test_a_model_that_cannot_be_had_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["no-such-model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace fetch: there is no model 'no-such-model'") and error.count("\n") == 1


def test_a_download_shows_itself_also_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(spec: str, cache_dir: Path, progress: Progress) -> ModelSource:
        for done in (0, 5_000_000, 10_000_000):
            progress(done, 10_000_000)
        raise ModelSourceError("the network is gone")

    monkeypatch.setattr("shared.model_source.resolve", resolve)
    with pytest.raises(ModelSourceError):
        model_download.fetch_model("m", tmp_path)
    assert capsys.readouterr().err == "Downloading m (10 MB)\n"
