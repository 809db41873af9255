"""How many bytes of memory loading a model takes: `python -m tests.gpu_worker.loaded_memory MODEL LIBRARY`.

Alone in its process: private memory, and pages of the model's file that are still mapped. With the heads that come
along, where some do.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kernels.native.library import NativeLibrary
from services.gpu_worker.heads_loading import heads_of
from services.gpu_worker.native_engine import NativeEngine
from shared.settings import WorkerSettings


def resident_bytes(model: Path) -> int:
    """Of anonymous memory, and of the file."""
    num_kib, counts = 0, ("Anonymous:",)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):  # the head of a mapping
            counts = ("Rss:",) if values[-1] == str(model) else ("Anonymous:",)
        elif key in counts:
            num_kib += int(values[0])
    return num_kib * 1024


def main() -> int:
    model, library = (Path(argument).resolve() for argument in sys.argv[1:])
    native = NativeLibrary(library, library.stem)
    heads = heads_of(WorkerSettings(), model, Path())
    before = resident_bytes(model)
    engine = NativeEngine.load(model, native, num_threads=1, kv_cache_bytes=1 << 20)
    loaded = heads.load(engine) if heads else None
    sys.stdout.write(f"{resident_bytes(model) - before}\n")
    return 0 if engine.info.num_blocks and (loaded or not heads) else 1


if __name__ == "__main__":
    sys.exit(main())
