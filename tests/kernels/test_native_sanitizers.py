"""The native ops under the compiler's sanitizers: no data race, no read or write outside of what is allocated.

Results are those of one thread, whatever the number of threads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.native import build
from tests.kernels.native_libraries import FOLDER, ISAS

DRIVER = Path(__file__).parent / "every_op.c"
PROGRAM = "int main(void) { return 0; }"
MESSAGES = ("ThreadSanitizer", "AddressSanitizer", "runtime error")

pytestmark = pytest.mark.timeout(300)  # a compiler at work beside others


def sanitized(sanitizers: str, isa: build.Isa, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Driver and library; the library is kept in the user's cache. Skips the test where the compiler has them not."""
    compiler = next((c for c in map(shutil.which, build.COMPILERS) if c), None)
    flag, driver = f"-fsanitize={sanitizers}", folder / "every_op"
    probe = [compiler or "", flag, "-x", "c", "-", "-o", driver]
    if compiler is None or subprocess.run(probe, input=PROGRAM, text=True, capture_output=True).returncode:
        pytest.skip(f"there is no compiler with {flag}")
    subprocess.run(
        [
            compiler,
            "-std=gnu11",
            "-O1",
            "-ffp-contract=off",
            flag,
            "-I",
            build.HERE,
            DRIVER,
            "-o",
            driver,
            "-ldl",
            "-lm",
        ],
        check=True,
    )
    flags = tuple("-O1" if f == "-O3" else f for f in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", (*flags, "-g", "-fno-omit-frame-pointer", flag))
    path = FOLDER / build.file_name(isa)
    return driver, path if path.is_file() else build.build(isa, FOLDER, lambda line: None)


def run(driver: Path, library: Path, num_threads: int) -> bytes:
    """What every op gives; fails with the first complaint."""
    env = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # the driver leaves its memory to the system
    done = subprocess.run([driver, library, str(num_threads)], capture_output=True, env=env)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0 and not any(m in said for m in MESSAGES), said[:4000]
    return done.stdout


def test_threads_do_not_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = sanitized("thread", ISAS[0], tmp_path, monkeypatch)
    alone = run(driver, library, 1)
    assert all(run(driver, library, num_threads) == alone for num_threads in (2, 3, 5))


@pytest.mark.parametrize("isa", ISAS[:1] + ISAS[-1:], ids=lambda isa: isa.name)
def test_nothing_outside_of_memory_is_touched(isa: build.Isa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = sanitized("address,bounds,shift,signed-integer-overflow", isa, tmp_path, monkeypatch)
    assert run(driver, library, 1) == run(driver, library, 3)
