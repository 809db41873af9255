"""`headrace serve` with stand-ins for the services: what is started, with what, and that nothing is left behind.

The stand-ins are a tree of their own; the supervisor, Redis and all processes are real.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from services import serve as serve_module
from services.serve import CannotServe, Plan, check_ports, programs
from shared.embedded_redis import StateFolder, find_server
from shared.runtime import EXIT_CONFIG
from shared.scripts import prefix_of
from shared.settings import DEFAULT_MODEL, SCRIPTED_MODEL, SettingsError
from tests.helpers import free_port, running_redis, wait_until_sync

wait = functools.partial(wait_until_sync, timeout=30)  # several interpreters start at once

ROOT = Path(__file__).parents[2]
DRIVER = """
import pathlib, sys
from services import modules
from services.serve import serve
from shared.settings import current_environ
modules.TREE = pathlib.Path(sys.argv[1])
sys.exit(serve(current_environ()))
"""
STAND_IN = """
import http.server, json, os, sys, time
environ = {k: v for k, v in os.environ.items() if k.startswith("HEADRACE_")}
sys.stdout.write("settings " + json.dumps(environ) + "\\n")
sys.stdout.flush()
"""
WAITS = "time.sleep(600)\n"
ANSWERS = """
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(environ["HEADRACE_PORT"])), Ready).serve_forever()
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for service in ("gateway", "scheduler", "cache_store", "gpu_worker"):
        folder = tmp_path / "tree" / "services" / service
        folder.mkdir(parents=True)
        (folder / "__main__.py").write_text(STAND_IN + (ANSWERS if service == "gateway" else WAITS))
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
    return tmp_path / "tree"


class Serving:
    """A running `serve` and its output."""

    def __init__(self, tree: Path, tmp_path: Path, **settings: str) -> None:
        self.port = free_port()
        self.state = tmp_path / "state"
        self.output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
        (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
        fields = {"port": str(self.port), "state_dir": str(self.state), "model": str(tmp_path / "tiny.gguf")} | settings
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        environ |= {f"HEADRACE_{field.upper()}": value for field, value in fields.items()}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(tree)], cwd=ROOT, env=environ, stdout=file, stderr=file
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def ready(self) -> None:
        wait(lambda: "curl -N" in self.text or self.process.poll() is not None)
        assert self.process.poll() is None, self.text

    def children(self) -> dict[str, psutil.Process]:
        """Module or program name → process, of those that have become what they should."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                if "-m" in words and "launcher.py" not in " ".join(words):
                    found[words[words.index("-m") + 1].removeprefix("services.")] = child
                elif child.name().startswith("redis"):
                    found["redis"] = child
        return found

    def all_children(self) -> list[psutil.Process]:
        """One of each service, and Redis, once all are there."""
        return list(wait(lambda: len(children := self.children()) == 5 and children).values())

    def settings_of(self, name: str) -> dict[str, str]:
        """As the first life of that process saw them."""

        def line_of() -> str:
            lines = self.text.splitlines()
            return next((line for line in lines if line.startswith(name) and "settings {" in line), "")

        line: str = wait(line_of)
        settings: dict[str, str] = json.loads(line.partition("settings ")[2])
        return settings

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.state / "redis.sock"))


@pytest.fixture
def start(tree: Path, tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start_one(**settings: str) -> Serving:
        started.append(Serving(tree, tmp_path, **settings))
        return started[-1]

    yield start_one
    for serving in started:
        serving.process.kill()
        serving.process.wait()


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_the_stack_starts_says_how_to_use_it_and_stops_in_order(start: Callable[..., Serving]) -> None:
    serving = start(workers="2", api_keys="k-secret")
    serving.ready()
    children = serving.all_children()
    text = serving.text
    assert "serves tiny on" in text and f"http://127.0.0.1:{serving.port}/v1/chat/completions" in text
    own_lines = [line for line in text.splitlines() if "settings {" not in line]
    assert "Authorization: Bearer" in text and "k-secret" not in "".join(own_lines)
    gateway, worker = serving.settings_of("gateway"), serving.settings_of("worker-1")
    assert gateway["HEADRACE_API_KEYS"] == "k-secret" and "HEADRACE_API_KEYS" not in worker
    assert gateway["HEADRACE_REDIS_URL"] == worker["HEADRACE_REDIS_URL"] == f"unix://{serving.state}/redis.sock"
    assert gateway["HEADRACE_INCARNATION"].startswith("g-") and worker["HEADRACE_INCARNATION"].startswith("w-")
    assert len(gateway["HEADRACE_SECRET"]) == 64
    assert worker["HEADRACE_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(20) == 0
    assert all_gone(children)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_it_and_the_next_one_starts_at_once(
    start: Callable[..., Serving], sig: signal.Signals
) -> None:
    serving = start()
    serving.ready()
    children = serving.all_children()
    with serving.client() as client:
        client.set("kept", "1")
    serving.process.send_signal(sig)
    serving.process.wait(20)
    again = start()
    again.ready()
    assert all_gone(children)
    with again.client() as client:
        assert client.get("kept") == b"1"


def test_dead_children_come_back_and_their_end_is_told(start: Callable[..., Serving]) -> None:
    serving = start()
    serving.ready()
    incarnation = serving.settings_of("worker")["HEADRACE_INCARNATION"]
    serving.all_children()
    before = serving.children()
    with serving.client() as client:
        client.set("kept", "1")
        before["gpu_worker"].kill()
        wait(lambda: serving.children().get("gpu_worker", before["gpu_worker"]) != before["gpu_worker"])
        wait(lambda: client.exists(prefix_of("tiny") + "events"))
        assert incarnation.encode() in client.xrange(prefix_of("tiny") + "events")[0][1][b"m"]
    before["redis"].kill()
    wait(lambda: serving.children().get("redis", before["redis"]) != before["redis"])
    with serving.client() as client:

        def value() -> bytes | None:
            with contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
                return client.get("kept")
            return None

        assert wait(value) == b"1"
    assert serving.children()["scheduler"] == before["scheduler"]


def test_a_second_one_on_the_same_state_folder_is_refused_in_one_sentence(start: Callable[..., Serving]) -> None:
    first = start()
    first.ready()
    sentence = f"headrace: Another `headrace serve` (process {first.process.pid}) uses the state folder {first.state}: "
    second = start()
    assert second.process.wait(20) == 1
    assert second.text == sentence + "stop it, or give this one its own with --state-dir.\n"


def test_a_port_in_use_is_refused_in_one_sentence(start: Callable[..., Serving]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        serving = start(port=str(port))
        assert serving.process.wait(20) == 1
    assert serving.text.startswith(f"headrace: Cannot listen on 127.0.0.1:{port} (Address already in use)")
    assert serving.text.count("\n") == 1 and not serving.state.exists()


def test_a_model_that_cannot_be_had_is_refused_in_one_sentence(start: Callable[..., Serving]) -> None:
    serving = start(model="no-such-model")
    assert serving.process.wait(20) == 1
    assert serving.text.startswith("headrace: there is no model 'no-such-model'") and serving.text.count("\n") == 1


def test_a_redis_that_does_not_start_is_told_with_its_reason(start: Callable[..., Serving], tmp_path: Path) -> None:
    StateFolder(tmp_path / "state").close()
    (tmp_path / "state" / "appendonlydir").write_text("not a folder")
    serving = start()
    assert serving.process.wait(20) == 1
    assert "The embedded Redis does not start" in serving.text


def test_a_service_that_refuses_its_settings_ends_it(start: Callable[..., Serving], tree: Path) -> None:
    refusal = f"import sys\nsys.stderr.write('model: has no weights\\n')\nsys.exit({EXIT_CONFIG})"
    (tree / "services" / "gpu_worker" / "__main__.py").write_text(refusal)
    serving = start()
    assert serving.process.wait(20) == EXIT_CONFIG
    assert "worker cannot run, its settings cannot be used: model: has no weights" in serving.text


def test_a_given_redis_is_used_and_none_is_started(start: Callable[..., Serving], redis_url: str) -> None:
    serving = start(redis_url=redis_url)
    serving.ready()
    assert "redis" not in serving.children() and not serving.state.exists()
    assert serving.settings_of("scheduler")["HEADRACE_REDIS_URL"] == redis_url


def test_a_given_redis_that_forgets_is_refused_unless_that_is_wanted(
    start: Callable[..., Serving], tmp_path: Path
) -> None:
    with running_redis(find_server(), tmp_path / "forgetful", append_only=False) as url:
        serving = start(redis_url=url)
        assert serving.process.wait(20) == 1
        assert "keeps no append-only file" in serving.text and "--volatile" in serving.text
        assert "settings {" not in serving.text  # nothing was started
        start(redis_url=url, volatile="1").ready()


def test_its_own_redis_keeps_what_is_written_unless_told_not_to(start: Callable[..., Serving]) -> None:
    serving = start(volatile="1")
    serving.ready()
    assert not (serving.state / "appendonlydir").exists()
    serving.process.terminate()
    serving.process.wait(20)
    start().ready()
    assert (serving.state / "appendonlydir").exists()


def test_numbers_of_services_and_their_ports() -> None:
    plan = Plan.load({"HEADRACE_GATEWAYS": "2", "HEADRACE_SCHEDULERS": "3", "HEADRACE_PORT": "9000"})
    found = {program.name: program for program in programs(plan)}
    assert list(found) == [
        "cache-store", "worker", "scheduler-0", "scheduler-1", "scheduler-2", "gateway-0", "gateway-1",
    ]  # fmt: skip
    assert found["gateway-1"].environ("g-1")["HEADRACE_PORT"] == "9001"
    stages = [found[name].stage for name in ("gateway-0", "scheduler-0", "worker", "cache-store")]
    assert stages == sorted(stages) and max(stages) < serve_module.REDIS_STAGE


def test_the_scripted_engine_brings_its_vocabulary() -> None:
    assert Plan.load({"HEADRACE_ENGINE": "scripted"}).common.model == SCRIPTED_MODEL
    assert Plan.load({"HEADRACE_ENGINE": "scripted", "HEADRACE_MODEL": "m"}).common.model == "m"
    assert Plan.load({}).common.model == DEFAULT_MODEL


def test_settings_of_every_service_are_checked_first() -> None:
    for name, value in (("SCRIPTED_STEP_MS", "-1"), ("SCHEDULING_POLICY", "x"), ("ENABLE_PREFIX_CACHING", "x")):
        with pytest.raises(SettingsError):
            Plan.load({f"HEADRACE_{name}": value})


def test_an_address_that_is_not_here_is_refused() -> None:
    with pytest.raises(CannotServe, match=r"Cannot listen on 192\.0\.2\.1:1234"):
        check_ports("192.0.2.1", [1234])
    check_ports("127.0.0.1", [free_port()])
