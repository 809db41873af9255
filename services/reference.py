"""Makes docs/settings.md from the commands and settings themselves: `python -m services.reference`."""

from __future__ import annotations

import sys

from services.cli import COMMANDS, Command
from shared.options import markdown_tables
from shared.settings import ALL_SECTIONS

INTRODUCTION = """\
# Commands and settings

<!-- Made by `make docs` from services/cli.py and shared/settings.py; edit those. -->

A setting is an option of the commands that use it and an environment variable of the same meaning; the option wins.
An empty variable counts as unset. Sizes may have a unit (`512MB`, `2GiB`); a variable that holds several values
separates them by commas, where the option is repeated. What cannot be used is refused in one sentence, with exit
status 78; so is an option that does nothing yet.
"""


def document() -> str:
    commands = ["## Commands", "", "| command | what it does | example |", "|---|---|---|", *map(_row, COMMANDS), ""]
    return "\n".join([INTRODUCTION, *commands, "## Settings", "", markdown_tables(ALL_SECTIONS)])


def _row(command: Command) -> str:
    example = f"`{command.example}`" if command.example else ""
    return f"| `headrace {command.name}` | {command.help} | {example} |"


if __name__ == "__main__":
    sys.stdout.write(document())
