"""Twins and partitions of schedulers and stores; their deaths by themselves: `test_killed_scheduler_or_store.py`."""

from __future__ import annotations

import functools
import time

import pytest

from shared.protocol import MemberKind
from tests.chaos import checker
from tests.chaos.cuts import LEASES_NEVER_RUN_OUT, NOBODY_CLAIMS
from tests.chaos.link import DOWN, UP, Mode
from tests.chaos.play import Play, Run
from tests.e2e.clients import longest_pause_s
from tests.e2e.load import mixed
from tests.e2e.process import Process
from tests.e2e.state import Sequence
from tests.helpers import wait_until

LEASES: dict[MemberKind, str] = {"scheduler": "run", "store": "pool"}
AWAY = ("Redis is away",)


def led_by(victim: Process, run: Run, kind: MemberKind, running: list[Sequence]) -> str:
    """A worker that the victim leads."""
    return next(s.worker for s in running if run.stack.state.owner(LEASES[kind], s.worker) == victim.incarnation)


async def leader_is_killed(run: Run, kind: MemberKind) -> None:
    """Without a word. What comes meanwhile waits for its successor, and no longer than that."""
    load = await run.decoding()
    victim = run.victim(kind, load.running)
    worker = led_by(victim, run, kind, load.running)
    killed_at = run.stack.kill(victim)
    late = run.client().begin_all(mixed("late"))
    with checker.invariant("I1"):
        await wait_until(
            lambda: run.stack.state.owner(LEASES[kind], worker) not in ("", victim.incarnation), run.timeout_s
        )
    run.figures["detected_s"] = time.perf_counter() - killed_at
    await load.judged(killed_at)
    answers = await late
    for answer in answers:
        answer.check()
    run.figures["late_pause_s"] = longest_pause_s(answers, killed_at)
    await run.stack.restart(victim)


async def leader_is_cut_off(run: Run, kind: MemberKind, mode: Mode, directions: tuple[str, ...]) -> None:
    """It still believes that it leads when it is heard again: what it says then is refused, or harmless."""
    load = await run.decoding()
    victim = run.victim(kind, load.running)
    worker = led_by(victim, run, kind, load.running)
    cut_at = time.perf_counter()
    async with run.stack.link(victim).broken(mode, directions):
        with checker.invariant("I1"):
            await wait_until(
                lambda: run.stack.state.owner(LEASES[kind], worker) not in ("", victim.incarnation), run.timeout_s
            )
        run.figures["detected_s"] = time.perf_counter() - cut_at
        await load.judged(cut_at)
    await wait_until(lambda: len(run.stack.state.alive(kind)) == 2, 20)
    again = await run.client().ask_all(mixed("load"))
    checker.judge_all(again, run.undisturbed)


KINDS: list[MemberKind] = ["scheduler", "store"]
TWO = {"workers": 2, "schedulers": 2, "stores": 2}


@pytest.mark.slow  # test_killed_scheduler_or_store.py kills them faster
@pytest.mark.parametrize("kind", ["scheduler", "store"])
async def test_killed(kind: MemberKind, play: Play) -> None:
    await play.play(functools.partial(leader_is_killed, kind=kind), **TWO)


@pytest.mark.parametrize("kind", [pytest.param("scheduler", marks=pytest.mark.slow), "store"])
async def test_killed_where_leases_never_run_out(kind: MemberKind, play: Play) -> None:
    await play.objects(functools.partial(leader_is_killed, kind=kind), "I1", *LEASES_NEVER_RUN_OUT, **TWO)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [Mode.SWALLOW, Mode.HOLD])
@pytest.mark.parametrize("directions", [(UP, DOWN), (UP,), (DOWN,)], ids="-".join)
async def test_cut_off(kind: MemberKind, mode: Mode, directions: tuple[str, ...], play: Play) -> None:
    scenario = functools.partial(leader_is_cut_off, kind=kind, mode=mode, directions=directions)
    await play.play(scenario, with_links=True, allowed=AWAY, timeout_s=30, **TWO)


async def scheduler_dies_with_a_queue(run: Run) -> None:
    """Entries that it has read and not placed are claimed by another."""
    worker = run.stack.process("worker").incarnation
    victim = run.stack.by_incarnation(run.stack.state.owner("run", worker))  # the one that reads the queue
    answering = run.client().begin_all(mixed("load") * 4)
    await wait_until(lambda: run.stack.state.num_queued() > 20)
    run.stack.kill(victim)
    await run.stack.report(victim)
    answers = await answering
    checker.judge_all(answers, run.undisturbed * 4)
    await run.stack.restart(victim)


FEW_SLOTS = {"scripted_step_ms": 10, "scripted_token_ms": 0.2, "max_num_seqs": 8}


async def test_killed_with_a_queue(play: Play) -> None:
    await play.play(scheduler_dies_with_a_queue, schedulers=2, env=FEW_SLOTS)


@pytest.mark.slow
async def test_killed_with_a_queue_where_nobody_claims(play: Play) -> None:
    await play.objects(scheduler_dies_with_a_queue, "I1|I2", NOBODY_CLAIMS, schedulers=2, env=FEW_SLOTS)
