"""The native ops for tests: every instruction set that this machine runs, built once into the user's cache."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kernels.native import build
from kernels.native.build import NoNativeOps
from kernels.native.library import NativeLibrary
from shared.model_source import default_cache_dir

FOLDER = default_cache_dir() / "native"
ISAS = build.isas(platform.machine(), build.cpu_flags())


def library_path(isa: build.Isa) -> Path:
    places = [folder / build.file_name(isa) for folder in (build.BUILT, FOLDER)]
    found = next((p for p in places if p.is_file()), None)
    try:
        return found or build.build(isa, FOLDER, lambda line: None)
    except NoNativeOps as e:
        pytest.skip(str(e))


def library_for(isa: build.Isa) -> NativeLibrary:
    return NativeLibrary(library_path(isa), isa.name)


def best_library() -> NativeLibrary:
    return library_for(ISAS[0])
