"""`headrace serve --engine scripted` as people start it: what it says, what it survives, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services import modules
from shared.settings import SCRIPTED_MODEL, child_environ, current_environ
from tests.e2e.clients import Connect
from tests.e2e.load import USAGE, mixed, plain, words
from tests.e2e.state import State
from tests.helpers import free_port, wait_until

ERROR = re.compile(r" ERROR |Traceback|Warning: ")
NAMES = {"gateway", "gateway.template_process", "scheduler", "cache_store", "gpu_worker", "redis"}


class Serving:
    """A running command, and its output so far."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.output = folder / f"output-{self.port}-{time.monotonic_ns()}"
        environ = modules.environ(child_environ(current_environ(), "serve", {}))
        command = [
            *modules.command("services.cli", "serve", "--engine", "scripted", "--port", str(self.port)),
            "--state-dir", str(folder / "state"), *options,
        ]  # fmt: skip
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def redis_socket(self) -> Path:
        return self.output.parent / "state" / "redis.sock"

    @property
    def text(self) -> str:
        return self.output.read_text()

    async def ready(self) -> None:
        await wait_until(lambda: "curl -N" in self.text or self.process.poll() is not None, 30)
        assert self.process.poll() is None, self.text

    def children(self) -> dict[str, psutil.Process]:
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words_of = child.cmdline()
                if child.name().startswith("redis"):
                    found["redis"] = child
                elif "-m" in words_of and "launcher.py" not in " ".join(words_of):
                    found[words_of[words_of.index("-m") + 1].removeprefix("services.")] = child
        return found

    async def stop(self, sig: signal.Signals) -> float:
        """Seconds until it has ended."""
        started = time.perf_counter()
        self.process.send_signal(sig)
        await asyncio.to_thread(self.process.wait, 20)
        return time.perf_counter() - started


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*options: str, port: int = 0) -> Serving:
        started.append(Serving(tmp_path, *options, port=port))
        return started[-1]

    yield start
    for serving in started:
        serving.process.kill()
        serving.process.wait(10)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
async def test_it_serves_and_stops_in_order(
    sig: signal.Signals, serve: Callable[..., Serving], connect: Connect
) -> None:
    serving = serve()
    await serving.ready()
    assert f"serves {SCRIPTED_MODEL} on none" in serving.text and f"{serving.url}/v1/chat/completions" in serving.text
    children = serving.children()
    assert set(children) == NAMES
    client = connect(serving.url)
    answer = await client.ask(plain("hello", **USAGE))
    answer.check()
    assert answer.text == words("hello", 48)
    curl = await asyncio.create_subprocess_shell(curl_line(serving.text), stdout=subprocess.PIPE)
    streamed, _ = await curl.communicate()
    assert streamed.count(b"chat.completion.chunk") > 10 and b"data: [DONE]" not in streamed  # it has no end: cut
    seconds = await serving.stop(sig)
    assert serving.process.returncode == 0 and all_gone(list(children.values()))
    assert seconds < 10
    assert not ERROR.search(serving.text), serving.text


async def test_only_the_gateway_listens_and_only_on_loopback(serve: Callable[..., Serving]) -> None:
    serving = serve("--workers", "2")
    await serving.ready()
    listening = set()
    for process in (psutil.Process(serving.process.pid), *psutil.Process(serving.process.pid).children(recursive=True)):
        found = process.net_connections("inet")
        listening |= {c.laddr for c in found if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM}
    assert {tuple(address) for address in listening} == {("127.0.0.1", serving.port)}
    door = serving.redis_socket
    assert door.stat().st_mode & 0o077 == 0 and door.parent.stat().st_mode & 0o077 == 0


def curl_line(text: str) -> str:
    """The one that the banner shows, for a second: the scripted engine would go on until its context is full."""
    line = next(line for line in text.splitlines() if "curl -N" in line)
    return line[line.index("curl -N") :].replace("curl -N", "curl -N -s --max-time 1", 1)


async def test_a_child_that_is_killed_comes_back_and_no_stream_is_lost(
    serve: Callable[..., Serving], connect: Connect
) -> None:
    serving = serve("--workers", "2", "--scripted-step-ms", "20")
    await serving.ready()
    client = connect(serving.url)
    state = State(f"unix://{serving.redis_socket}", SCRIPTED_MODEL)
    undisturbed = await client.ask_all(mixed("load"))
    for name in ("gpu_worker", "scheduler", "cache_store", "redis"):
        victim = serving.children()[name]
        answering = client.begin_all(mixed("load"))
        await wait_until(lambda: len(state.running()) > 10)
        victim.kill()
        for answer, same in zip(await answering, undisturbed, strict=True):
            answer.check()
            assert answer.essence() == same.essence(), name
        await wait_until(lambda: set(serving.children()) == NAMES)
        assert serving.children()[name].pid != victim.pid
    state.close()
    text = serving.text
    assert len(re.findall(r"was ended by SIGKILL; next start in", text)) == 4
    await serving.stop(signal.SIGTERM)
    assert serving.process.returncode == 0


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV])
async def test_nothing_outlives_a_serve_that_crashes(sig: signal.Signals, serve: Callable[..., Serving]) -> None:
    serving = serve()
    await serving.ready()
    children = list(serving.children().values())
    serving.process.send_signal(sig)
    await wait_until(lambda: all_gone(children))
    again = serve(port=serving.port)
    await again.ready()
    await again.stop(signal.SIGTERM)
    assert again.process.returncode == 0


async def test_a_second_one_on_the_same_state_says_so(serve: Callable[..., Serving]) -> None:
    first = serve()
    await first.ready()
    second = serve()
    assert await asyncio.to_thread(second.process.wait, 20) == 1
    assert "Another `headrace serve`" in second.text and len(second.text.splitlines()) == 1
    assert "--state-dir" in second.text
    same_port = serve("--state-dir", str(first.output.parent / "other"), port=first.port)
    assert await asyncio.to_thread(same_port.process.wait, 20) == 1
    assert len(same_port.text.splitlines()) == 1 and f"127.0.0.1:{first.port}" in same_port.text
    await first.stop(signal.SIGTERM)
    assert first.process.returncode == 0


async def test_a_port_in_use_is_one_sentence(serve: Callable[..., Serving]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        serving = serve(port=taken.getsockname()[1])
        assert await asyncio.to_thread(serving.process.wait, 20) == 1
    assert len(serving.text.splitlines()) == 1 and "--port" in serving.text


async def test_what_cannot_work_ends_with_one_sentence(serve: Callable[..., Serving], tmp_path: Path) -> None:
    for options, status, word in (
        (("--tensor-parallel-size", "2"), 78, "tensor_parallel_size"),
        (("--host", "0.0.0.0"), 78, "--api-key"),
        (("--model", str(tmp_path / "none.gguf"), "--engine", "torch"), 1, "none.gguf"),
    ):
        serving = serve(*options)
        assert await asyncio.to_thread(serving.process.wait, 20) == status, serving.text
        assert len(serving.text.splitlines()) == 1 and word in serving.text, serving.text


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
async def test_a_signal_while_it_starts_stops_it(sig: signal.Signals, serve: Callable[..., Serving]) -> None:
    serving = serve()
    await wait_until(lambda: "gpu_worker" in serving.children(), every=0.005)
    children = list(serving.children().values())
    await serving.stop(sig)
    assert serving.process.returncode == 0 and all_gone(children)
    assert not ERROR.search(serving.text), serving.text


def test_the_command_is_installed() -> None:
    program = Path(sys.executable).parent / "headrace"
    done = subprocess.run([program, "serve", "--help"], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0 and "--kv-cache-bytes" in done.stdout
