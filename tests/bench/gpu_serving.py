"""A whole model on a GPU: its engine with drafts and without, and the stack of services around it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from shared.settings import current_environ, variable
from tests.bench.performance_stack import serving

Row = dict[str, Any]
AUTO = '{"method": "auto"}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 8}'


def _environ(fields: Mapping[str, str], **more: str) -> dict[str, str]:
    return current_environ() | {variable(field): value for field, value in {**fields, **more}.items()}


def _run(arguments: list[str], environ: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """The last line of a command's output, which is JSON."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def speculation(settings: Mapping[str, str], load: tuple[int, int], timeout_s: float) -> Iterator[Row]:
    """settings: of the worker. load: requests, and tokens of each."""
    num_requests, max_tokens = (str(n) for n in load)
    arguments = [
        "services.gpu_worker.commands.bench_engine", "--num-requests", num_requests, "--concurrency", "1",
        "--prompt-tokens", "16", "--max-tokens", max_tokens,
    ]  # fmt: skip
    for name, config in (("off", "none"), ("ngram", NGRAM), ("auto", AUTO)):
        found = _run(arguments, _environ(settings, speculative_config=config), timeout_s)
        yield {"what": f"engine, 1 sequence, speculation {name}", "tok/s": found["output_tok_s"]}


def stack(settings: Mapping[str, str], load: tuple[int, int], timeout_s: float) -> Iterator[Row]:
    """RuntimeError where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    try:
        with serving("", port, *options) as own:
            for concurrency in (1, 8):
                arguments = [
                    "services.tools.bench", "--url", own.url, "--concurrency", str(concurrency), "--num-requests",
                    str(load[0]), "--prompt-words", "8", "--max-tokens", str(load[1]), "--json",
                ]  # fmt: skip
                found = _run(arguments, current_environ(), timeout_s)
                yield {"what": f"stack, {concurrency} at a time", "tok/s": found["output_tok_s"]}
    except SystemExit as e:  # what others measure is not to be lost with it
        raise RuntimeError(str(e)) from None
