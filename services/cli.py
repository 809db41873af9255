"""The `headrace` command: what commands there are, and which program each one is.

Options become the environment variables that the services read anyway; then the program takes this process' place.
Only `serve` runs here, since it is the parent of the others. Imports no service: a command that needs an engine is
started by its module's name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from services import modules
from shared.options import add_options, given
from shared.runtime import EXIT_CONFIG
from shared.settings import (
    SERVE_SECTIONS,
    SERVICE_SECTIONS,
    Section,
    ServeSettings,
    SettingsError,
    current_environ,
    variable,
)

USAGE_ERROR = 2
INTERRUPTED = 130  # as a shell counts a program that Ctrl-C has ended


@dataclass(frozen=True)
class Command:
    """A module that takes the process over; `service` marks one that is configured by that service's settings."""

    name: str
    group: str
    help: str
    module: str = ""
    service: str = ""
    example: str = ""


SERVING, SINGLE, USING = (
    "serve a model",
    "one service of a larger deployment, all on one --redis-url",
    "use and measure",
)
COMMANDS = (
    Command("serve", SERVING, "run the whole stack on this machine",
            example="headrace serve ./model.gguf --port 9000 --workers 2"),
    Command("fetch", SERVING, "download a model, so that it starts at once later", "services.tools.fetch",
            example="headrace fetch hf:org/name"),
    Command("gateway", SINGLE, "HTTP in front: takes requests, streams answers", "services.gateway", "gateway",
            "headrace gateway --redis-url redis://db:6379/0 --host 0.0.0.0 --api-key KEY"),
    Command("scheduler", SINGLE, "decides which sequences run where", "services.scheduler", "scheduler",
            "headrace scheduler --redis-url redis://db:6379/0"),
    Command("cache-store", SINGLE, "owns KV blocks, shares equal prefixes", "services.cache_store", "cache_store",
            "headrace cache-store --redis-url redis://db:6379/0"),
    Command("gpu-worker", SINGLE, "computes, on a GPU or on the CPU", "services.gpu_worker", "gpu_worker",
            "headrace gpu-worker --redis-url redis://db:6379/0 --max-num-seqs 32"),
    Command("chat", USING, "chat in the terminal with a running stack", "services.tools.chat",
            example="headrace chat --url http://127.0.0.1:8000"),
    Command("bench", USING, "load a running stack and measure it", "services.tools.bench",
            example="headrace bench --concurrency 8 --prompt-words 100 --max-tokens 64"),
    Command("bench engine", USING, "the same load in one process, without the services",
            "services.gpu_worker.commands.bench_engine", example="headrace bench engine --concurrency 8"),
    Command("eval perplexity", USING, "how well the model foresees a text, as llama-perplexity counts it",
            "services.gpu_worker.commands.eval_perplexity", example="headrace eval perplexity text.txt"),
    Command("convert", USING, "a GGUF file from a Hugging Face folder, or a folder from a GGUF file",
            "services.gpu_worker.commands.convert", example="headrace convert ./folder model.gguf --outtype q8_0"),
    Command("plan", USING, "what fits on a card or on this machine, before anything is loaded",
            "services.gpu_worker.commands.plan", example="headrace plan ./model --device 48GiB --context 8192"),
    Command("train-heads", USING, "heads that draft for a model: EAGLE or Medusa, from text that it writes itself",
            "services.gpu_worker.commands.train_heads",
            example="headrace train-heads ./model --data self --hours 2 --output ./heads"),
    Command("dead", USING, "list, show and retry requests that were given up", "services.tools.dead",
            example="headrace dead list"),
    Command("version", USING, "print the version"),
)  # fmt: skip
BY_NAME = {command.name: command for command in COMMANDS}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return 0
    name, rest = _split(args)
    command = BY_NAME.get(name)
    if command is None:
        return _fail(_unknown(name))
    if name in ("version", "--version"):
        sys.stdout.write(f"headrace {version('headrace')}\n")
        return 0
    environ = current_environ()
    try:
        if name == "serve":
            return _serve(rest, environ)
        if command.service:
            options = service_parser(command).parse_args(rest)
            _become(command.module, [], environ | given(options, SERVICE_SECTIONS[command.service]))
        _become(command.module, rest, environ)
    except SettingsError as e:
        sys.stderr.write(f"headrace {name}: {e}\n")
        return EXIT_CONFIG
    except KeyboardInterrupt:  # before anything runs that would have to be stopped in order: in a download, most likely
        return INTERRUPTED
    return 0


def _split(args: list[str]) -> tuple[str, list[str]]:
    """The command's name, of one word or two, and its arguments."""
    if args[0] in ("-V", "--version"):
        return "version", args[1:]
    if " ".join(args[:2]) in BY_NAME:
        return " ".join(args[:2]), args[2:]
    return args[0], args[1:]


def _serve(args: list[str], environ: Mapping[str, str]) -> int:
    from services.serve import serve  # costs a second that `--help` and the others need not pay

    options = serve_parser().parse_args(args)
    entries = given(options, SERVE_SECTIONS)
    if options.model_argument is not None:
        entries[variable("model")] = options.model_argument
    return serve({**environ, **entries})


def serve_parser() -> argparse.ArgumentParser:
    parser = _parser(BY_NAME["serve"], "headrace serve [MODEL] [options]", "")
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    sections: list[type[Section]] = [section for section in SERVE_SECTIONS if section is not ServeSettings]
    add_options(parser, [ServeSettings, *sections], skip=["incarnation", "heartbeat_file"])  # of a single process
    return parser


def service_parser(command: Command) -> argparse.ArgumentParser:
    parser = _parser(command, f"headrace {command.name} [options]", "Each option is also an environment variable. ")
    add_options(parser, SERVICE_SECTIONS[command.service])
    return parser


def _parser(command: Command, usage: str, note: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"headrace {command.name}", usage=usage, description=command.help[0].upper() + command.help[1:] + ".",
        epilog=f"{note}Example: {command.example}", allow_abbrev=False,
    )  # fmt: skip


def _become(module: str, args: Sequence[str], environ: Mapping[str, str]) -> None:
    """This process is that program from here on: signals and exit status need no passing on."""
    sys.stdout.flush()
    argv = modules.command(module, *args)
    os.execve(argv[0], argv, modules.environ(environ))


def overview() -> str:
    lines = ["usage: headrace COMMAND [options]", "", "Serves large language models as a pipeline of small services."]
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines += ["", f"{group}:", *(f"  {c.name:<15} {c.help}" for c in COMMANDS if c.group == group)]
    examples = [BY_NAME["serve"].example, BY_NAME["chat"].example]
    lines += ["", "Examples:", "  headrace serve", *(f"  {example}" for example in examples)]
    lines += ["", "Options of a command: headrace COMMAND --help", ""]
    return "\n".join(lines)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, BY_NAME, n=1)
    return f"there is no command {name!r}; " + (f"did you mean {close[0]!r}?" if close else "see headrace --help")


def _fail(sentence: str) -> int:
    sys.stderr.write(f"headrace: {sentence}\n")
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
