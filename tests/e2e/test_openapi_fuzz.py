"""What `/openapi.json` says is held, for whatever a generator of requests can think of: schemathesis finds nothing."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import NewStack, Stack

CHECKS = Path(__file__).with_name("schema_checks.py")
SMALL = {"scripted_step_ms": 0.1, "scripted_num_blocks": 512, "max_model_len": 128, "max_queued_requests": 100_000}


async def fuzz(stack: Stack, folder: Path, seed: int, num_examples: int, timeout_s: float) -> str:
    """schemathesis' report; AssertionError with it if anything was found."""
    env = os.environ | {"SCHEMATHESIS_HOOKS": str(CHECKS), "PYTHONPATH": str(CHECKS.parents[2])}
    program = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("schemathesis")), "run", stack.url + "/openapi.json",
        "--checks", "all", "--exclude-checks", "positive_data_acceptance",  # there is a narrower one in CHECKS
        "--phases", "examples,coverage,fuzzing", "--max-examples", str(num_examples), "--seed", str(seed),
        "--continue-on-failure", "--workers", "2", "--generation-database", "none", "--request-timeout", "30",
        "--no-color", "--output-sanitize", "false", "--warnings", "off",
        cwd=folder, env=env, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    report = output.decode()
    assert program.returncode == 0, report[-20_000:]
    return report


@pytest.mark.timeout(240)
async def test_a_generator_of_requests_finds_nothing(new_stack: NewStack, tmp_path: Path) -> None:
    async with new_stack(env=SMALL) as stack:
        report = await fuzz(stack, tmp_path, seed=7, num_examples=5, timeout_s=200)
    assert re.search(r"[0-9]{3,} generated", report), report


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_generator_of_requests_finds_nothing_in_a_long_time(new_stack: NewStack, tmp_path: Path) -> None:
    async with new_stack(env=SMALL) as stack:
        for seed in range(4):
            await fuzz(stack, tmp_path, seed, num_examples=300, timeout_s=280)
