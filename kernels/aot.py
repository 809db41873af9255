"""Compiles the Triton kernels ahead of time for every kind of GPU, on a machine without one: `python -m kernels.aot`.

What is compiled is what each op's COMPILE_CASES would launch. A row of the table is one kernel for one target, with
what it takes: registers, shared memory, matrix instructions. The exit status is not 0 if something did not compile,
spills registers, needs more shared memory than the target has, lacks the matrix instruction that its case names,
fuses operations that were to be rounded one by one, or rounds float32 for the units that multiply.
Needs a process of its own: a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels.gpu
from kernels.gpu.launch import KIB, TARGETS, CompileCase, Launch, Target, recorded

BEST = "sm_90"  # the target that `--quick` compiles every case for

# In the order in which they are looked for: a kernel that has the first is not said to have the others.
MMA = {
    "cuda": {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma.sync": "mma.sync"},
    "hip": {"mfma_32x32": "_32x32x", "mfma_16x16": "_16x16x", "mfma": "v_mfma"},
}


@dataclass(frozen=True, slots=True)
class Task:
    op: str
    case: int
    target: str


@dataclass(frozen=True, slots=True)
class Report:
    """One kernel of one case, compiled for one target; error: what is wrong with it, if anything."""

    op: str
    case: str
    target: str
    kernel: str = ""
    registers: int = 0
    spills: int = 0  # bytes (cuda), registers (hip)
    shared: int = 0  # bytes
    mma: str = ""
    seconds: float = 0.0
    error: str = ""


def ops() -> list[str]:
    """Names of the modules in `kernels.gpu` that have compile cases."""
    names = sorted(module.name for module in pkgutil.iter_modules(kernels.gpu.__path__))
    return [name for name in names if cases(name)]


def cases(op: str) -> tuple[CompileCase, ...]:
    return getattr(importlib.import_module(f"kernels.gpu.{op}"), "COMPILE_CASES", ())


def tasks(chosen: Iterable[str], targets: Iterable[str], quick: bool) -> list[Task]:
    """quick: every case for BEST, and for the other targets as many as show each kernel of an op once."""
    found = []
    for op in chosen:
        for target in targets:
            seen: set[str] = set()
            for i, case in enumerate(cases(op)):
                launched = {launch.kernel.__name__ for launch in recorded(case.call, TARGETS[target])}
                if not quick or target == BEST or launched - seen:
                    found.append(Task(op, i, target))
                seen |= launched
    return found


def compile_task(task: Task) -> list[Report]:
    case, target = cases(task.op)[task.case], TARGETS[task.target]
    reports = []
    for launch in recorded(case.call, target):
        try:
            reports.append(compile_launch(task.op, case.name, launch, target))
        except Exception as e:  # of the compiler, which raises whatever it likes; reported, and it fails the run
            lines = str(e).strip().splitlines() or [type(e).__name__]
            reports.append(Report(task.op, case.name, target.name, launch.kernel.__name__, error=lines[-1]))
    wanted = case.mma.get(target.name, "")
    if wanted and not any(report.mma.startswith(wanted) or report.error for report in reports):
        found = ", ".join(sorted({report.mma for report in reports} - {""})) or "none"
        reports.append(Report(task.op, case.name, target.name, error=f"{wanted} expected, {found} found"))
    return reports


def compile_launch(op: str, case: str, launch: Launch, target: Target) -> Report:
    start = time.perf_counter()
    names = launch.kernel.arg_names
    signature = {name: launch.types.get(name, "constexpr") for name in names}
    source = ASTSource(
        fn=launch.kernel,
        signature=signature,
        constexprs={name: launch.constants[name] for name in names if name in launch.constants},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    compiled = triton.compile(source, target=gpu, options=dict(launch.options))
    registers, spills = _resources(compiled.asm, target)
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    mma = next((name for name, word in MMA[target.backend].items() if word in text), "")
    error = ""
    if launch.options.get("enable_fp_fusion") is False and _fuses(compiled.asm, target):
        error = "a multiplication is fused with an addition"
    if launch.constants.get("PRECISION") == "ieee" and "tf32" in text:
        error = "float32 is multiplied in tf32"
    if spills:
        error = f"{spills} {'bytes' if target.backend == 'cuda' else 'registers'} spilled"
    if compiled.metadata.shared > target.shared_bytes:
        error = f"{compiled.metadata.shared / KIB:.0f} KiB shared, {target.shared_bytes / KIB:.0f} are there"
    seconds = time.perf_counter() - start
    return Report(
        op, case, target.name, launch.kernel.__name__, registers, spills, compiled.metadata.shared, mma, seconds, error
    )


def _resources(asm: Mapping[str, Any], target: Target) -> tuple[int, int]:
    """(registers of a thread, what of them lies in memory)."""
    if target.backend == "hip":
        text = asm["amdgcn"]
        return _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    text = _dump(asm, "-res-usage")
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _fuses(asm: Mapping[str, Any], target: Target) -> bool:
    text = asm["amdgcn"] if target.backend == "hip" else _dump(asm, "-sass")
    return re.search(r"\b(FFMA|v_(pk_)?(fma|mac|mad|fmac)_f32)", text) is not None


def _dump(asm: Mapping[str, Any], what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    return max(int(n) for n in re.findall(pattern, text))


def reports_of(todo: list[Task], jobs: int) -> Iterator[list[Report]]:
    """In the order of the tasks."""
    if jobs == 1:
        yield from map(compile_task, todo)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_task, todo)


ABOUT = f"""# GPU kernels as they are compiled

Made by `make aot ARGS="--table docs/gpu_kernels.md"` with Triton {triton.__version__}, without a GPU: for each kernel
of a case registers of a thread, shared memory of a program in KiB, and the matrix instruction. Nothing spills. No time
was measured.
"""

HEADER = f"{'kernel':32} {'target':7} {'regs':>4} {'shared':>7} {'mma':10} {'s':>5}  case"


def table_row(r: Report) -> str:
    shared = f"{r.shared / KIB:.1f}K" if r.shared else "-"
    line = f"{r.kernel or r.op:32} {r.target:7} {r.registers:4} {shared:>7} {r.mma or '-':10} {r.seconds:5.1f}"
    return f"{line}  {r.case.replace('torch.', '')}{'  FAILED: ' + r.error if r.error else ''}"


def markdown(reports: Iterable[Report]) -> str:
    """A row for each kernel of a case, a column for each target."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for r in reports:
        parts = [
            str(r.registers),
            *([f"{r.shared / KIB:.0f}K"] if r.shared >= KIB else []),
            *([r.mma] if r.mma else []),
        ]
        row = rows.setdefault((r.kernel or r.op, r.case.replace("torch.", "")), {})
        row[r.target] = r.error or " ".join(parts)
    lines = [ABOUT, f"| kernel | case | {' | '.join(TARGETS)} |", "|---" * (2 + len(TARGETS)) + "|"]
    for (kernel, case), row in rows.items():
        lines.append(f"| `{kernel}` | {case} | {' | '.join(row.get(target, '') for target in TARGETS)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ops", nargs="*", help="ops to compile (all)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="of %(default)s")
    parser.add_argument("--quick", action="store_true", help=f"all cases for {BEST} alone, for others each kernel once")
    parser.add_argument("--table", type=Path, help="file for the table as markdown, written if all is as it should be")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (%(default)s)")
    options = parser.parse_args(arguments)
    todo = tasks(options.ops or ops(), options.targets.split(","), options.quick)
    start = time.perf_counter()
    reports = []
    print(HEADER)  # noqa: T201
    for part in reports_of(todo, options.jobs):
        reports += part
        print(*map(table_row, part), sep="\n", flush=True)  # noqa: T201
    failed = [report for report in reports if report.error]
    seconds = time.perf_counter() - start
    print(f"{len(reports)} kernels compiled in {seconds:.0f} s, {len(failed)} not as they should be")  # noqa: T201
    if failed or not reports:
        return 1
    if options.table is not None:
        options.table.write_text(markdown(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
