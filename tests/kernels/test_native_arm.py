"""The native ops on ARM, compiled across and run by an emulator: the bits are those of this machine's libraries.

These are held against the references elsewhere. NEON's dot products go with AVX2, since both fuse multiply-adds.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kernels.native import build
from tests.kernels.native_libraries import FOLDER, ISAS, library_path

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
DRIVER = Path(__file__).parent / "every_op.c"
DEBIAN_PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"

pytestmark = [
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this machine runs these libraries itself"),
    pytest.mark.skipif(
        not all(map(shutil.which, (COMPILER, EMULATOR))) or not Path(ROOT).is_dir(),
        reason=f"compiling for ARM and running it takes {DEBIAN_PACKAGES}",
    ),
    pytest.mark.timeout(300),  # a compiler at work beside others
]


def arm_library(name: str, optimisation: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kept in the user's cache, as those of this machine are. Optimised as far as the time of a test allows."""
    isa = next(isa for isa in build.ISAS if isa.name == name)
    with monkeypatch.context() as patch:
        patch.setattr(build.platform, "machine", lambda: "aarch64")
        patch.setattr(build, "COMPILERS", (COMPILER,))
        patch.setattr(build, "FLAGS", tuple(optimisation if flag == "-O3" else flag for flag in build.FLAGS))
        path = FOLDER / build.file_name(isa)
        return path if path.is_file() else build.build(isa, FOLDER, lambda line: None)


def results(library: Path, compiler: str, emulator: list[str], folder: Path) -> dict[str, bytes]:
    """What every op gives, by name."""
    driver = folder / f"every_op-{compiler}"
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-ffp-contract=off", "-I", build.HERE, DRIVER, "-o", driver, "-ldl", "-lm"],
        check=True,
    )
    output = subprocess.run([*emulator, driver, library], check=True, capture_output=True).stdout
    found: dict[str, bytes] = {}
    while output:
        line, _, output = output.partition(b"\n")
        name, size = line.decode().split()
        found[name], output = output[: int(size)], output[int(size) :]
    return found


@pytest.mark.parametrize(("arm", "optimisation", "here"), [("dotprod", "-O2", "avx2"), ("portable", "-O1", "portable")])
def test_the_same_bits(arm: str, optimisation: str, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = next((isa for isa in ISAS if isa.name == here), None)
    if ours is None:
        pytest.skip(f"nothing here computes as {arm} does: {here} is missing")
    compiler = next(c for c in build.COMPILERS if shutil.which(c))
    want = results(library_path(ours), compiler, [], tmp_path)
    emulated = arm_library(arm, optimisation, monkeypatch)
    got = results(emulated, COMPILER, [EMULATOR, "-L", ROOT], tmp_path)
    assert len(got) > 40 and got.keys() == want.keys()
    for name in want:
        if not name.endswith((".q", ".sums", "drawn", "draw")):
            assert np.isfinite(np.frombuffer(want[name], np.float32)).all(), name
    assert [name for name in want if got[name] != want[name]] == []
