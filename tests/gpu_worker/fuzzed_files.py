"""Files of weights damaged at random: `python -m tests.gpu_worker.fuzzed_files FOLDER KIND COUNT SEED`.

Loading one may end in an error of the file's or in a model, within a second and 200 MB; anything else ends this
process with the seed of that file. The folder is one that `write_originals` made.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels import matmul_dense
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.weights.loader import load_weights, open_source
from services.gpu_worker.weights.source import WeightsError
from shared.gguf_header import GGUFError
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import build

TINY: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "intermediate_size": 32, "vocab_size": 12}  # fmt: skip
EXPECTED = (ConfigError, WeightsError, GGUFError)
NUMBERS = (0, 1, 7, 0x7F, 0xFF, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1)
MAX_S, MAX_BYTES = 1.0, 200 << 20


def write_originals(folder: Path) -> None:
    model = build("llama", **TINY)
    model.save_pretrained(folder)
    write_gguf(model, folder / "model.gguf", type_name="Q4_0")


def damaged(data: bytes, chance: random.Random) -> bytes:
    """One to four changes, most of them where the header is."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = min(chance.randrange(len(out) if chance.random() < 0.2 else min(len(out), 2200)), len(out) - 1)
        kind = chance.randrange(6)
        if kind == 0:
            out[at] = chance.randrange(256)
        elif kind == 1:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            size = chance.choice((4, 8))
            out[at : at + size] = (chance.choice(NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif kind == 3:
            del out[at : at + chance.randint(1, 40)]
        elif kind == 4:
            out[at:at] = out[max(0, at - chance.randint(1, 80)) : at]  # said twice
        else:
            digits = str(chance.choice(NUMBERS)).encode()
            out[at : at + len(digits)] = digits
    return bytes(out[: chance.randrange(len(out))] if chance.random() < 0.1 else out)


def try_one(folder: Path, name: str, original: bytes, seed: int) -> bool:
    """Whether the damaged file loads."""
    (folder / name).write_bytes(damaged(original, random.Random(seed)))
    started = time.thread_time()
    try:
        load_weights(open_source(folder if name.endswith(".safetensors") else folder / name))
        loads = True
    except EXPECTED:
        loads = False
    spent = time.thread_time() - started
    assert spent < MAX_S, f"seed {seed}: {spent} s"
    return loads


def run(folder: Path, name: str, count: int, seed: int) -> int:
    """How many of them load."""
    original = (folder / name).read_bytes()
    num_loaded = 0
    for i in range(seed, seed + count):
        try:
            num_loaded += try_one(folder, name, original, i)
        except BaseException as e:
            e.add_note(f"{name}, seed {i}")
            raise
    (folder / name).write_bytes(original)
    return num_loaded


def main() -> None:
    folder, name, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    matmul_dense.rows_are_independent = lambda weight: True  # what it tries costs more than loading
    run(folder, name, 20, seed)  # whatever is allocated once
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, resource.RLIM_INFINITY))
    print(run(folder, name, count, seed))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
