"""The ahead-of-time compiler: launches on paper are production's, and what is wrong with a kernel is said."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from shared.settings import current_environ
from tests.rules.product import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")

# In a process of its own: this one may have been told to interpret.
CODE = """
from pathlib import Path
import torch
from kernels import aot
from kernels.gpu.launch import TARGETS, CompileCase, on_paper, recorded
from kernels.scaled_rows import scale_rows

x = on_paper(4, 64, dtype=torch.float16)
narrow = on_paper(4, 67, dtype=torch.float16)[:, 2:66]
case = CompileCase("small", lambda: scale_rows(x, torch.int8))
[launch] = recorded(case.call, TARGETS["sm_89"])
[apart] = recorded(lambda: scale_rows(narrow, torch.int8), TARGETS["sm_89"])
[one] = recorded(lambda: scale_rows(x[:, :1].contiguous(), torch.int8), TARGETS["sm_89"])
assert launch.types == {"x_ptr": "*fp16", "q_ptr": "*i8", "scale_ptr": "*fp32", "num_columns": "i32", "x_stride": "i32"}
assert launch.divisible == set(launch.types) and launch.constants["BLOCK"] == 64
assert apart.divisible == {"q_ptr", "scale_ptr", "num_columns"}
assert one.constants["num_columns"] == one.constants["x_stride"] == 1

aot.cases = lambda op: (case, CompileCase("wants wgmma", case.call, {"sm_90": "wgmma"}))
assert aot.main(["scaled_rows", "--targets", "sm_90", "--jobs", "1", "--table", "table.md"]) == 1
assert not Path("table.md").exists()
aot.cases = lambda op: (case,)
assert aot.main(["scaled_rows", "--targets", "sm_90,gfx942", "--jobs", "1", "--table", "table.md"]) == 0
[row] = [line.split(" | ") for line in Path("table.md").read_text().splitlines() if "_scale_rows_kernel" in line]
assert row[1:4] == ["small", "", ""] and int(row[4].split()[0]) > 0 and not row[5] and int(row[6].split()[0]) > 0, row
"""


@pytest.mark.timeout(300)
def test_compiles_what_is_launched_and_says_what_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=current_environ() | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "_scale_rows_kernel" in line]
    assert [row.split()[1] for row in rows] == ["sm_90", "sm_90", "sm_90", "gfx942"]
    assert all(int(row.split()[2]) > 0 for row in rows)
    assert "wants wgmma  FAILED: wgmma expected, none found" in done.stdout
    assert "1 not as they should be" in done.stdout


ROUNDED = """
from kernels import aot
from kernels.gpu.launch import Target

whole = [case for case in aot.cases("matmul_a16") if "float32, 4 bits by 128" in case.name]
aot.cases = lambda op: whole
sm_100 = ["matmul_a16", "--targets", "sm_100", "--jobs", "1"]
assert aot.main(sm_100) == 0
Target.rounds_computed_operands = False
assert aot.main(sm_100) == 1
"""


@pytest.mark.timeout(300)
def test_float32_is_not_multiplied_in_fewer_bits() -> None:
    done = subprocess.run([sys.executable, "-c", ROUNDED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "FAILED: float32 is multiplied in tf32" in done.stdout


STEPS = """
import torch
from kernels.attention import AttentionOptions, attention, attention_batch
from kernels.gpu.launch import TARGETS, on_paper, recorded
from kernels.gpu.matmul_a16 import on_paper_weight
from kernels.kv_cache import KvCache
from kernels.log_sums import log_sums
from kernels.logit_edits import LogitEdits, edit_logits_
from kernels.matmul_a16 import matmul_a16
from kernels.matmul_float import FloatWeight, matmul_float
from kernels.matmul_w8a8 import ScaledWeight, matmul_w8a8
from kernels.scaled_rows import scale_rows

ints, floats, halves = (lambda *s, d=d: on_paper(*s, dtype=d) for d in (torch.int32, torch.float32, torch.bfloat16))
cache = KvCache(halves(1000, 8, 16, 128), halves(1000, 8, 16, 128), None, None)
whole, bits = FloatWeight(halves(4096, 4096)), on_paper_weight(4096, 4096, 4, 128, None)
scaled = ScaledWeight(on_paper(4096, 4096, dtype=torch.int8), floats(1, 4096))

def attend(first_row, length):
    batch = attention_batch([1] * 3, [length] * 3, [range(-(-length // 16))] * 3, 4, first_row=first_row, device="meta")
    attention(halves(200, 32, 128), cache, batch, AttentionOptions(0.1))

def edit(count):
    edits = LogitEdits(ints(count), ints(count), floats(count), ints(count), ints(count), floats(2, 3))
    edit_logits_(floats(2, 1000), edits)

for step, sizes in {
    lambda n: matmul_float(halves(n, 4096), whole): (1, 7, 16),
    lambda n: matmul_a16(halves(n, 4096), bits): (1, 7, 16),
    lambda n: matmul_w8a8(scale_rows(halves(n, 4096), torch.int8), scaled, None, torch.bfloat16): (1, 7, 16),
    lambda n: matmul_float(halves(100 * n, 4096), whole): (1, 2, 5),
    lambda n: attend(n, 300): (0, 1, 16, 33),
    lambda n: attend(0, n): (257, 300, 16 * 256),
    lambda n: log_sums(floats(2, 1000), n): (1, 5, 16),
    edit: (1, 5, 16),
}.items():
    first, *others = [recorded(lambda n=n: step(n), TARGETS["sm_90"]) for n in sizes]
    assert all(launches == first for launches in others), (sizes, first, others)
"""


@pytest.mark.timeout(60)
def test_steps_of_other_sizes_are_not_compiled_anew() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
