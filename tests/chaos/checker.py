"""The invariants I1 to I10, whatever has happened to a stack: whatever objects says the number.

I1  every accepted request has one end, and it is the one that its client was told
I2  a client is told one end, or its connection broke
I3  positions have no gap and no repeat
I4  the answer is the undisturbed one; what is left of a broken one is its beginning
I5  usage counts what was delivered; a prompt is never cached as a whole
I6  entries, leases, blocks, sockets, threads come back to what they were
I7  no block has two holders, unless shared and full; what stores count is what workers have
I8  streams are trimmed, and memory does not grow
I9  nobody ended but those who were killed
I10 no log has an error that was not expected

A stack without work is asked (`at_rest`), a client's answer is judged (`judge`), and a run over time is looked at again
and again (`Growth`).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from tests.e2e.clients import Answer, num_choices
from tests.e2e.process import Process
from tests.e2e.stack import Stack
from tests.helpers import wait_until

REST_S = 12.0  # metrics come every 2 s, an orphan has its grace time before
MAX_MORE_FILES = 100  # connections to Redis, of which a pool keeps as many as were in use at once


class Violation(AssertionError):
    """An invariant does not hold; the text begins with its number."""


@contextlib.contextmanager
def invariant(number: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, TimeoutError) as e:
        raise Violation(f"{number}: {e}") from e


def judge(answer: Answer, same: Answer, *, may_break: bool = False, may_be_refused: bool = False) -> str:
    """Invariants 2 to 5 of one client: whole, broken, or refused. may_break: its gateway ended.

    A refusal is honest before anything has been sent: it has a status, a code, and says when to come back.
    """
    if answer.status in (429, 503):
        with invariant("I2"):
            assert may_be_refused and answer.error and answer.error["code"], answer
            assert int(answer.headers["Retry-After"]) >= 1 and not answer.choices, answer
        return "refused"
    if may_break and (answer.broken or not answer.done):
        _check_beginning(answer, same)
        return "broken"
    with invariant("I2"):
        assert answer.status == 200 and answer.error is None and not answer.broken, (
            answer.status, answer.error, answer.broken,
        )  # fmt: skip
        assert answer.done or not answer.body.get("stream"), "no [DONE]"
        assert sorted(answer.choices) == list(range(num_choices(answer.body))), sorted(answer.choices)
        assert all(c.finish_reason in ("stop", "length") for c in answer.choices.values()), answer.choices
    with invariant("I3"):
        for choice in answer.choices.values():
            assert choice.positions == sorted(choice.positions), choice.positions
    with invariant("I4"):
        assert answer.essence() == same.essence()
    _check_usage(answer)
    return "whole"


def _check_beginning(answer: Answer, same: Answer) -> None:
    with invariant("I2"):
        assert not answer.done, "it broke after its end"
    with invariant("I4"):
        for index, choice in answer.choices.items():
            assert same.choices[index].text.startswith(choice.text), (choice.text, same.choices[index].text)


def _check_usage(answer: Answer) -> None:
    usage = answer.usage
    if not usage:
        return
    with invariant("I5"):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"], usage
        if answer.body.get("stream"):
            assert answer.position == usage["completion_tokens"], (answer.position, usage)


def judge_all(answers: list[Answer], undisturbed: list[Answer]) -> None:
    """All whole."""
    for answer, same in zip(answers, undisturbed, strict=True):
        judge(answer, same)


def check_record(stack: Stack, answer: Answer) -> None:
    """I1, by the request's record, right after a whole answer and while the record is kept."""
    for index, choice in answer.choices.items():
        sequence = stack.state.sequence(f"{answer.rid}.{index}")
        if sequence is None:
            continue  # retention has run out, or Redis lost it and the client was told
        # a stop string is found by the gateway, which tells Redis after its client; the worker may have run ahead
        ends = {"length"} if choice.finish_reason == "length" else {"stop", "length", "cancelled"}
        with invariant("I1"):
            assert sequence.state == "done" or choice.finish_reason == "stop", sequence
            assert sequence.outcome is None or sequence.outcome.reason in ends, (sequence, choice)
        with invariant("I3"):
            length = len(stack.state.log(sequence.sid))
            assert length == sequence.num_tokens or sequence.state != "done", (length, sequence)


@dataclass
class Rest:
    """What each process of a stack without work holds; the start values of invariant 6."""

    stack: Stack
    files: dict[str, int] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stack: Stack) -> Rest:
        rest = cls(stack)
        for process in stack.processes():
            rest.files[process.name], rest.threads[process.name] = _held(process)
        return rest

    async def check(self) -> None:
        """I1 (nothing is open), I6, I7, I8 (streams), I9."""
        with invariant("I9"):
            self.stack.check_alive()
        try:
            await wait_until(lambda: not self.stack.state.unrest(), REST_S, every=0.05)
        except TimeoutError:
            unrest = self.stack.state.unrest()
            raise Violation(f"{_number_of(unrest)}: not at rest: {'; '.join(unrest)}") from None
        with contextlib.suppress(TimeoutError):
            await wait_until(lambda: not self._held_more(), 5.0, every=0.1)
        with invariant("I6"):
            assert not self._held_more(), self._held_more()

    def _held_more(self) -> list[str]:
        more = []
        for process in self.stack.processes():
            files, threads = _held(process)
            if process.kind == "gateway" and (number := _num_clients(process)):
                more.append(f"{process.name} has {number} connections of clients")
            if files > self.files.get(process.name, files) + MAX_MORE_FILES:
                more.append(f"{process.name} has {files} open files")
            if threads > self.threads.get(process.name, threads) + 1:
                more.append(f"{process.name} has {threads} threads")
        return more


def _held(process: Process) -> tuple[int, int]:
    seen = psutil.Process(process.pid)
    return seen.num_fds(), seen.num_threads()


def _num_clients(gateway: Process) -> int:
    port = gateway.port
    connections = psutil.Process(gateway.pid).net_connections("tcp")
    return sum(c.laddr.port == port and c.status not in ("LISTEN", "TIME_WAIT") for c in connections)


def _number_of(unrest: list[str]) -> str:
    text = " ".join(unrest)
    if " is queued" in text or " is placed" in text or "queue" in text:
        return "I1"
    return "I8" if "entries" in text and "blocks" not in text else "I6/I7"


def check_logs(stack: Stack) -> None:
    with invariant("I10"):
        stack.check_logs()


@dataclass
class Growth:
    """I8 over time: points of (seconds, value), and what a line through them says."""

    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.points.append((at, value))

    def per_minute(self) -> float:
        """The slope of the second half, where start-up is over."""
        late = self.points[len(self.points) // 2 :]
        if len(late) < 3:
            return 0.0
        return 60 * statistics.linear_regression(*zip(*late, strict=True)).slope
