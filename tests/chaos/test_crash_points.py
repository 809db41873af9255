"""A process dies just before or just after a script: wanted and not done, done and not known. Nothing is lost."""

from __future__ import annotations

import functools

import pytest

from shared.protocol import MemberKind
from tests.chaos import checker
from tests.chaos.cuts import LEASES_NEVER_RUN_OUT, NOBODY_REQUEUES
from tests.chaos.play import Play, Run
from tests.e2e.load import mixed
from tests.helpers import wait_until

PLACES: list[tuple[MemberKind, str]] = [
    ("scheduler", "before-assign:3"),  # blocks are allocated, nobody is told
    ("scheduler", "after-assign:3"),  # placed, and the scheduler does not know
    ("scheduler", "before-plan:2"),
    ("scheduler", "after-plan:2"),
    ("scheduler", "after-send:4"),  # a call is with the store, and nobody waits for its answer
    ("scheduler", "after-take_lease"),
    ("store", "before-send:3"),  # carried out, not answered
    ("store", "after-send:3"),
    ("store", "after-take_lease"),
    ("worker", "before-commit:4"),  # drawn, not in the log
    ("worker", "after-commit:4"),  # in the log, and the worker does not know
    ("worker", "after-send:1"),
]
FAST = {("scheduler", "after-assign:3"), ("worker", "after-commit:4")}


async def dies_at(run: Run, kind: MemberKind, moment: str) -> None:
    """All of that kind are replaced by ones that will die there, at the first chance; their successors live. Of the
    workers one stays, or new requests would be refused."""
    for process in run.stack.processes(kind)[: 1 if kind == "worker" else None]:
        run.stack.kill(process)
        await run.stack.report(process)
        await run.stack.restart(process, crash_at=moment)
    await wait_until(lambda: len(run.stack.state.members()) == sum(run.stack.numbers.values()) or died(run, kind), 20)
    async with run.stack.supervised():
        client = run.client()
        checker.judge_all(await client.ask_all(mixed("load")), run.undisturbed)
        checker.judge_all(await client.ask_all(mixed("load")), run.undisturbed)
        assert died(run, kind), f"nobody came to {moment}"
    assert not run.stack.ended_unasked, run.stack.ended_unasked


def died(run: Run, kind: MemberKind) -> bool:
    return any(p.kind == kind and p.may_crash and p.popen.poll() is not None for p in run.stack.lives)


@pytest.mark.parametrize(
    ("kind", "moment"), [pytest.param(*p, marks=() if p in FAST else pytest.mark.slow) for p in PLACES]
)
async def test_nothing_is_lost(kind: MemberKind, moment: str, play: Play) -> None:
    await play.play(functools.partial(dies_at, kind=kind, moment=moment), workers=2, schedulers=2, stores=2)


@pytest.mark.slow
async def test_a_worker_where_nobody_requeues(play: Play) -> None:
    scenario = functools.partial(dies_at, kind="worker", moment="after-commit:4")
    await play.objects(scenario, "I2", NOBODY_REQUEUES, workers=2)


@pytest.mark.slow
async def test_a_scheduler_where_leases_never_run_out(play: Play) -> None:
    scenario = functools.partial(dies_at, kind="scheduler", moment="after-assign:3")
    await play.objects(scenario, "I2", *LEASES_NEVER_RUN_OUT, workers=2, schedulers=2)


async def admission_dies(run: Run, moment: str) -> None:
    """The gateway dies with an admission that has happened, or not: nothing runs for a client that knows nothing."""
    gateway = run.stack.process("gateway", 0)
    run.stack.kill(gateway)
    await run.stack.report(gateway)
    gateway = await run.stack.restart(gateway, crash_at=moment)
    await wait_until(lambda: gateway.port)
    load = await run.decoding(gateway=1)
    answers = await run.client().ask_all(mixed("lost"))
    assert all(a.broken and not a.choices for a in answers), answers
    await wait_until(lambda: gateway.popen.poll() is not None)
    gateway.expected_to_end = True
    await run.stack.report(gateway)
    await load.judged()
    await wait_until(lambda: not run.stack.state.running(), 20)
    await run.stack.restart(gateway)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before-admit", "after-admit"])
async def test_an_admission(moment: str, play: Play) -> None:
    await play.play(functools.partial(admission_dies, moment=moment), workers=2, gateways=2)
