"""Lines of the console: named, in order, and never waiting for whoever reads them."""

from __future__ import annotations

import os
from pathlib import Path

from services.console import MAX_WAITING_LINES, Console, NamedStream


def test_names_are_aligned_and_coloured_only_on_request(tmp_path: Path) -> None:
    for name, colour in (("plain", False), ("coloured", True)):
        with (tmp_path / name).open("w") as file:
            console = Console(file.fileno(), ["serve", "worker-0"], colour)
            console.line("serve", "one")
            console.line("worker-0", "two")
            console.plain("three")
            console.close()
    assert (tmp_path / "plain").read_text() == "serve    | one\nworker-0 | two\nthree\n"
    coloured = "\x1b[36mserve    |\x1b[0m one\n\x1b[33mworker-0 |\x1b[0m two\nthree\n"
    assert (tmp_path / "coloured").read_text() == coloured


def test_json_lines_have_nothing_in_front(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        console = Console(file.fileno(), ["serve"], prefixed=False)
        NamedStream(console, "serve").write('{"a": 1}\n')
        console.close()
    assert (tmp_path / "out").read_text() == '{"a": 1}\n'


def test_a_reader_that_stops_costs_lines_and_no_time() -> None:
    read_end, write_end = os.pipe()  # holds 64 KiB, then the writer waits
    with open(read_end) as reader, open(write_end, "w") as writer:
        console = Console(writer.fileno(), ["a"])
        num_lines = MAX_WAITING_LINES + 2000
        for number in range(num_lines):
            console.line("a", f"{number:0100d}")
        lines = [reader.readline() for _ in range(MAX_WAITING_LINES)]
        console.line("a", "last")  # there is room again
        while lines[-1] != "a | last\n":
            lines.append(reader.readline())
        console.close()
    assert lines[0] == f"a | {0:0100d}\n"
    notes = [line for line in lines if "lines not shown: the reader was too slow" in line]  # one, or more if it is slow
    assert notes and len(lines) - len(notes) - 1 + sum(int(note[1:].split()[0]) for note in notes) == num_lines


def test_a_reader_that_is_gone_does_no_harm() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    console = Console(write_end, ["a"])
    for _ in range(10):
        console.line("a", "x")
    console.close()
    os.close(write_end)
