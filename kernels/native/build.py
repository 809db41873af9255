"""Builds the native ops with the system's C compiler, once for each state of the sources.

A library's name holds its instruction set and a hash of sources, flags and kind of machine, so nothing stale is found.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.native.library import NativeLibrary

HERE = Path(__file__).parent
BUILT = HERE / "built"  # where an image has them
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread",
    # Rounding as written: no multiply-add but by name. The other two change no result, and allow vectors.
    "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
BUILD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set: needs are flags of /proc/cpuinfo."""

    name: str
    machine: str  # as `platform.machine` says it; empty for any
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2_FLAGS = frozenset({"avx2", "fma", "f16c"})
_AVX512_FLAGS = _AVX2_FLAGS | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}

# The best first.
ISAS = (
    Isa("avx512vnni", "x86_64", _AVX512_FLAGS, _AVX512),
    Isa("avxvnni", "x86_64", _AVX2_FLAGS | {"avx_vnni"}, (*_AVX2, "-mavxvnni")),
    Isa("avx2", "x86_64", _AVX2_FLAGS, _AVX2),
    Isa("dotprod", "aarch64", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
    Isa("portable", "", frozenset(), ()),
)


class NoNativeOps(RuntimeError):
    """They cannot be built or loaded here; the message says why."""


def isas(machine: str, cpu_flags: frozenset[str]) -> list[Isa]:
    """Those that such a machine can run, the best first."""
    return [isa for isa in ISAS if isa.machine in ("", machine) and isa.needs <= cpu_flags]


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.lower().startswith(("flags", "features"))), "").split())


def sources() -> list[Path]:
    return sorted(p for p in HERE.iterdir() if p.suffix in (".c", ".h"))


def library_name(isa: Isa) -> str:
    digest = hashlib.sha256(repr((FLAGS, isa.flags, platform.machine())).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{isa.name}-{digest.hexdigest()[:16]}"


def load(folder: Path, say: Callable[[str], None]) -> NativeLibrary:
    """The best for this machine: from an image, from folder, or built into folder now. NoNativeOps if there is none."""
    first_failure = None
    for isa in isas(platform.machine(), cpu_flags()):
        found = next((path for place in (BUILT, folder) if (path := place / file_name(isa)).is_file()), None)
        try:
            library = _open(found or build(isa, folder, say), isa)
        except NoNativeOps as e:
            first_failure = first_failure or e
            continue
        if first_failure is not None:
            say(f"Computing with {isa.name} instead: {first_failure}")
        return library
    raise first_failure or NoNativeOps("no instruction set is known")


def file_name(isa: Isa) -> str:
    return f"headrace-{library_name(isa)}.so"


def build(isa: Isa, folder: Path, say: Callable[[str], None]) -> Path:
    """Compiles into folder; a library appears there whole or not at all."""
    target = folder / file_name(isa)
    compiler = next((c for c in map(shutil.which, COMPILERS) if c), None)
    if compiler is None:
        raise NoNativeOps(f"no C compiler was found ({', '.join(COMPILERS)})")
    c_files = [str(p) for p in sources() if p.suffix == ".c"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as work:
            say(f"Compiling the CPU kernels for {isa.name} (once, some seconds)…")
            new = Path(work) / "new.so"
            done = subprocess.run(
                [compiler, *FLAGS, *isa.flags, *c_files, "-o", str(new), "-lm"],
                capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S,
            )  # fmt: skip
            if done.returncode:
                raise NoNativeOps(f"{compiler} failed: {_first_error(done.stderr)}")
            os.replace(new, target)
    except (OSError, subprocess.SubprocessError) as e:
        raise NoNativeOps(f"the CPU kernels could not be built: {e}") from e
    return target


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])


def _open(path: Path, isa: Isa) -> NativeLibrary:
    try:
        return NativeLibrary(path, library_name(isa))
    except (OSError, AttributeError) as e:
        raise NoNativeOps(f"{path}: {e}") from e


def main(argv: Sequence[str] | None = None) -> int:
    ap = argparse.ArgumentParser(description="Builds the native CPU kernels.")
    ap.add_argument("folder", type=Path, nargs="?", default=BUILT)
    ap.add_argument("--all", action="store_true", help="for every instruction set of this kind of machine")
    args = ap.parse_args(argv)
    machine = platform.machine()
    chosen = [i for i in ISAS if i.machine in ("", machine)] if args.all else isas(machine, cpu_flags())[:1]

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    failed = 0  # one that this compiler lacks costs none of the others
    for isa in chosen:
        try:
            if not (args.folder / file_name(isa)).is_file():
                build(isa, args.folder, say)
        except NoNativeOps as e:
            failed += 1
            say(f"{isa.name}: {e}")
    if failed == len(chosen):
        say("Without CPU kernels torch will compute, which is several times slower.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
