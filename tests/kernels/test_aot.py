"""The ahead-of-time compiler: launches on paper are production's, and what is wrong with a kernel is said."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")

# In a process of its own: this one may have been told to interpret.
CODE = """
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
assert aot.main(["scaled_rows", "--targets", "sm_90", "--jobs", "1"]) == 1
"""


@pytest.mark.timeout(300)
def test_compiles_what_is_launched_and_says_what_is_wrong() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "_scale_rows_kernel" in line]
    assert [row.split()[1] for row in rows] == ["sm_90", "sm_90"]
    assert all(int(row.split()[2]) > 0 for row in rows)
    assert "wants wgmma  FAILED: wgmma expected, none found" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("1 not as they should be")
