"""Measures the figures of docs/reliability.md's table of failure modes: `make figures`.

Runs the tests of each mode (all, or those whose numbers are given) one after another, takes what they note
(`tests.figures`), and writes the last column of the table. A range is over tests and their parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.figures import VARIABLE

TREE = Path(__file__).parents[2]
DOC = TREE / "docs" / "reliability.md"
FILE = TREE / "build" / "figures.jsonl"  # a line a note, the latest last
# mode → tests whose notes are its figures: files, or functions in them
TESTS: dict[int, tuple[str, ...]] = {
    1: ("chaos/test_lost_worker.py::test_killed",
        "chaos/test_killed_worker.py::test_streams_go_on_with_the_same_tokens",
        "e2e/test_same_answer.py::test_when_the_worker_is_killed"),
    2: ("chaos/test_lost_worker.py::test_stopped_and_wakes_up",
        "chaos/test_hung_worker.py::test_a_hung_engine_is_noticed"),
    3: ("gpu_worker/test_worker_loops.py::test_a_worker_without_memory_hands_back_all_but_the_one_to_blame",),
    4: ("chaos/test_killed_scheduler_or_store.py::test_another_one_takes_over[scheduler]",
        "chaos/test_killed_scheduler_or_store.py::test_killed_and_restarted[scheduler]"),
    5: ("chaos/test_killed_scheduler_or_store.py::test_stopped_until_another_has_taken_over",),
    6: ("chaos/test_killed_scheduler_or_store.py::test_another_one_takes_over[store]",
        "chaos/test_killed_scheduler_or_store.py::test_killed_and_restarted[store]"),
    7: ("chaos/test_killed_redis.py::test_everybody_waits_and_goes_on", "chaos/test_lost_redis.py::test_killed",
        "chaos/test_lost_redis.py::test_all_connections_are_dropped", "chaos/test_lost_redis.py::test_it_stands_still"),
    8: ("e2e/test_volatile_redis.py",
        "chaos/test_killed_redis.py::test_a_redis_that_comes_back_empty_ends_what_it_has_forgotten"),
    9: ("chaos/test_failover.py",),
    10: ("chaos/test_lost_worker.py::test_cut_off", "chaos/test_lost_scheduler_or_store.py::test_cut_off",
         "chaos/test_lost_gateway.py::test_cut_off"),
    11: ("e2e/test_slow_readers.py",),
    12: ("e2e/test_disconnects.py",),
    13: ("chaos/test_killed_gateway.py::test_request_lifecycle_only_its_own_clients_notice_and_their_requests_end",
         "e2e/test_reattach.py"),
    14: ("chaos/test_duplicates.py",),
    15: ("e2e/test_bad_input.py::test_a_poison_request_costs_at_most_three_workers_and_ends_as_one_error",),
    16: ("e2e/test_clock_skew.py",),
    17: ("e2e/test_full_redis.py::test_what_runs_goes_on_while_its_memory_is_full",),
    18: ("e2e/test_event_loop.py::test_nothing_huge_holds_up_a_neighbour",),
    19: ("e2e/test_characters.py::test_a_worker_killed_inside_a_character",),
    20: ("e2e/test_fairness.py",),
    21: ("gpu_worker/test_load_failures.py::test_the_exit_status_says_what_is_to_blame",),
    22: ("e2e/test_mixed_versions.py",),
    23: ("chaos/test_rolling_restart.py",
         "chaos/test_killed_worker.py::test_a_worker_that_is_told_to_stop_hands_its_sequences_over"),
    24: ("e2e/test_event_loop.py::test_a_blocked_loop_is_named_and_its_streams_go_on",),
    25: ("e2e/test_full_redis.py::test_a_full_disk_stops_everybody_until_there_is_room",),
    26: ("e2e/test_descriptors.py",),
    27: ("e2e/test_capacity.py::test_admission_and_limits_a_prompt_that_can_never_fit_is_told_the_capacity",),
    28: ("chaos/test_restarted_all.py", "chaos/test_restarts.py::test_everything_at_once"),
}  # fmt: skip
AFTER = "## Who is answered when one is killed\n"  # what comes after the table
WHERE = "Last measured on"
UNITS = ("s", "MiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.figures", description=__doc__)
    parser.add_argument("modes", nargs="*", type=int, default=sorted(TESTS))
    parser.add_argument("--as-noted", action="store_true", help="run nothing; table what earlier runs have noted")
    args = parser.parse_args()
    if not args.as_noted:
        FILE.parent.mkdir(exist_ok=True)
        FILE.unlink(missing_ok=True)
        tests = sorted({f"tests/{test}" for mode in args.modes for test in TESTS[mode]})
        options = ["-q", "-p", "no:randomly", "--timeout", "300", "-m", "slow or not slow"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        if subprocess.run(command, cwd=TREE, env=os.environ | {VARIABLE: str(FILE)}, check=False).returncode:
            sys.exit("Some failed, so the table is left as it is (--as-noted writes it all the same).")
    found = {mode: text for mode in args.modes if (text := in_words(notes_of(TESTS[mode])))}
    where = f"{WHERE} {os.cpu_count()} cores with {os.getloadavg()[2]:.0f} processes waiting for them (load average)."
    text = re.sub(f"^{WHERE} .*", where, with_figures(DOC.read_text(), found), flags=re.MULTILINE)
    DOC.write_text(text)
    sys.stdout.write("".join(f"| {mode} | {text} |\n" for mode, text in found.items()) + where + "\n")
    return 0


def notes_of(tests: Sequence[str]) -> Iterator[dict[str, float]]:
    for line in map(json.loads, FILE.read_text().splitlines()):
        name = line.pop("test").removeprefix("tests/")
        if any(re.match(re.escape(test) + r"($|::|\[)", name) for test in tests):
            yield line


def in_words(notes: Iterator[dict[str, float]]) -> str:
    """`detected 0.9 to 1.1 s, pause 1.5 s`: the figures of several notes, name by name."""
    values: dict[str, list[float]] = {}
    for note in notes:
        for name, value in note.items():
            values.setdefault(name, []).append(value)
    return ", ".join(_phrase(name, found) for name, found in values.items())


def _phrase(name: str, found: list[float]) -> str:
    words = name.split("_")
    unit = f" {words.pop()}" if words[-1] in UNITS else ""
    low, high = (_number(value) for value in (min(found), max(found)))
    return f"{' '.join(words)} {low if low == high else f'{low} to {high}'}{unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) or value >= 100 else f"{value:.2f}" if value < 1 else f"{value:.1f}"


def with_figures(text: str, found: dict[int, str]) -> str:
    """The table of modes with these in the last column of their rows."""
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines[: lines.index(AFTER)]):
        row = re.match(r"\| (\d+) \|.*\|.*\|.*\|(?=.*\|$)", line)
        if row and int(row[1]) in found:
            lines[i] = f"{row[0]} {found[int(row[1])]} |\n"
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
