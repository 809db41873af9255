"""The command line: what is offered, what becomes of options, what is said about a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from services import cli, modules
from services.cli import BY_NAME, COMMANDS, main, overview
from shared.runtime import EXIT_CONFIG


class Became(Exception):
    """Stands for the program that takes the process over."""

    def __init__(self, argv: list[str], environ: Mapping[str, str]) -> None:
        self.argv = argv
        self.environ = environ


@pytest.fixture(autouse=True)
def no_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    def execve(path: str, argv: list[str], environ: Mapping[str, str]) -> None:
        raise Became(argv, environ)

    monkeypatch.setattr(os, "execve", execve)
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def became(*args: str) -> Became:
    with pytest.raises(Became) as caught:
        main(args)
    return caught.value


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["-h"], ["--help"], ["help"]):
        assert main(args) == 0
        assert capsys.readouterr().out == overview()
    assert all(f"  {command.name} " in overview() and command.help in overview() for command in COMMANDS)


@pytest.mark.parametrize("name", [command.name for command in COMMANDS if command.service])
def test_a_service_gets_its_options_as_environment(name: str) -> None:
    program = became(name, "--redis-url", "redis://h/0", "--log-level", "debug")
    assert program.argv == [sys.executable, "-m", f"services.{name.replace('-', '_')}"]
    assert program.environ["HEADRACE_REDIS_URL"] == "redis://h/0"
    assert program.environ["HEADRACE_LOG_LEVEL"] == "debug"


def test_options_win_over_the_environment_which_stays_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "1")
    monkeypatch.setenv("HEADRACE_HOST", "::1")
    program = became("gateway", "--port", "2", "--api-key", "a", "--api-key", "b", "--no-auth")
    values = {k: v for k, v in program.environ.items() if k.startswith("HEADRACE_")}
    assert values == {
        "HEADRACE_PORT": "2", "HEADRACE_HOST": "::1", "HEADRACE_API_KEYS": "a,b", "HEADRACE_NO_AUTH": "true",
    }  # fmt: skip


def test_tools_get_their_arguments_as_they_are() -> None:
    assert became("bench", "--concurrency", "8").argv[2:] == ["services.tools.bench", "--concurrency", "8"]
    engine = became("bench", "engine", "--concurrency", "8")
    assert engine.argv[2:] == ["services.gpu_worker.commands.bench_engine", "--concurrency", "8"]
    assert became("chat", "--help").argv[2:] == ["services.tools.chat", "--help"]


def test_the_same_tree_is_used_whatever_the_current_folder_has(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    environ = modules.environ({"PYTHONPATH": "/elsewhere"})
    assert environ["PYTHONPATH"] == f"{modules.TREE}{os.pathsep}/elsewhere"
    code = [sys.executable, "-c", "import shared; print(shared.__file__)"]
    done = subprocess.run(code, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(modules.TREE / "shared" / "__init__.py")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["srve"], "headrace: there is no command 'srve'; did you mean 'serve'?\n"),
        (["zzz"], "headrace: there is no command 'zzz'; see headrace --help\n"),
    ],
)
def test_an_unknown_command_is_one_sentence(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == cli.USAGE_ERROR
    assert capsys.readouterr().err == sentence


def test_serve_refuses_wrong_settings_of_any_service_before_it_starts_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--tensor-parallel-size", "2"]) == EXIT_CONFIG
    assert main(["serve", "--scheduling-policy", "priority"]) == EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("headrace serve: tensor_parallel_size: 2 is not supported yet, only 1")
    assert lines[1].startswith("headrace serve: scheduling_policy: priority is not supported yet, only fcfs")


@pytest.mark.parametrize("args", [["serve", "--port"], ["serve", "--no-such"], ["gateway", "--por", "1"]])
def test_a_misused_option_is_a_usage_error(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == cli.USAGE_ERROR
    assert "usage: headrace" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["serve", *(command.name for command in COMMANDS if command.service)])
def test_help_of_a_command_shows_groups_defaults_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "every service:" in text and "least severe level that is logged (info)" in text
    assert BY_NAME[name].example in text


def test_the_model_argument_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr("services.serve.serve", lambda environ: seen.append(environ) or 0)
    assert main(["serve", "./m.gguf", "--workers", "2"]) == 0
    assert main(["serve", "--model", "other"]) == 0
    assert [environ["HEADRACE_MODEL"] for environ in seen] == ["./m.gguf", "other"]
    assert seen[0]["HEADRACE_WORKERS"] == "2"


def test_ctrl_c_in_a_download_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(environ: Mapping[str, str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("services.serve.serve", interrupted)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace 0.")
