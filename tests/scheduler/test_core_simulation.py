"""Random interleavings of everything that can happen, with messages late, repeated and lost, and actors replaced.

Whatever happened: afterwards every sequence ends, with the right tokens, and nothing is held for nobody.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from shared.worker_protocol import Report, RunningState
from tests.scheduler.simulation import BLOCK_SIZE, Simulation, expected

PREFIXES = ([1] * 9, [2] * 17, [3])


NUM_FAULTS = 16
LATE = (6, 9, 11, 12, 13, 14, 15)  # nobody dies and nothing is lost but replies: what was said comes late, or twice


def disturbed(sim: Simulation, rng: random.Random, faults: Seq[int] = range(NUM_FAULTS)) -> None:
    """One fault."""
    match rng.choice(faults):
        case 0:
            sim.new_scheduler()
        case 1:
            sim.new_store()
        case 2:
            sim.tell_store()
        case 3 if sim.records:
            sim.cancel(rng.choice(list(sim.records.values())))
        case 4 if sim.cache:
            sim.cache.append(rng.choice(list(sim.cache)))  # a call whose reply was lost is sent again
        case 5 if sim.inbox:
            sim.inbox.append(rng.choice(list(sim.inbox)))  # an answer whose reply was lost
        case 6:
            sim.now += rng.choice((0.3, 1.0, 3.0))
        case 7 if sim.headers:
            sim.headers.append(replace(sim.headers[0]))  # claimed, and delivered too
        case 8:
            sim.replace_worker(rng.choice(list(sim.workers)))
        case 9 if not sim.assigned:
            if rng.randrange(2):
                sim.come_to_assign()
            if sim.todo:
                sim.lose_a_reply(rng)
        case 10 if len(sim.inbox) > 1:  # worker and store write to the same stream, each in its own order
            first, second = list(sim.inbox)[:2]
            if isinstance(first, Report | RunningState) != isinstance(second, Report | RunningState):
                sim.inbox[0], sim.inbox[1] = second, first

        case 11:
            worker = rng.choice(list(sim.workers.values()))
            worker.hears_replies = not worker.hears_replies
        case 12:
            rng.choice(list(sim.workers.values())).report(sim)
        case 13:
            sim.core.agree_anew()
        case 14:
            slowed(sim, rng)
        case 15:  # all others stand still
            for _ in range(rng.randrange(2, 5)):
                sim.now += 1.0
                sim.decide()
                while sim.todo or sim.assigned:
                    sim.deliver_reply() if sim.assigned else sim.act()


def slowed(sim: Simulation, rng: random.Random) -> None:
    """Somebody comes to what waits for it late, or not so late any more; maybe later than others' patience lasts."""
    sim.haste[rng.choice(list(sim.moves()))] = rng.choice((0.02, 0.1, 1.0))
    sim.pace = rng.choice((1.0, 10.0, 30.0))


@pytest.mark.parametrize("seed", range(60))
def test_everything_ends_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice((8, 12, 24))
    sim = Simulation(num_workers=rng.choice((1, 1, 2)), num_blocks=num_blocks)
    for _ in range(rng.randrange(5)):
        slowed(sim, rng)
    for i in range(rng.randrange(2, 9)):
        for _ in range(rng.randrange(40)):
            sim.random_move(rng)
        submit(sim, rng, i, max_tokens=12)
    for _ in range(rng.randrange(12)):
        disturbed(sim, rng)
        for _ in range(rng.randrange(40)):
            sim.random_move(rng)
    sim.run()
    check(sim)


@pytest.mark.parametrize("seed", range(110))
def test_nothing_is_left_where_long_answers_meet_what_is_said_late_or_twice(seed: int) -> None:
    """So long that their blocks change hands in between."""
    rng = random.Random(seed)
    sim = Simulation(num_blocks=rng.choice((12, 24, 40)))
    for i in range(rng.randrange(2, 12)):
        submit(sim, rng, i, max_tokens=rng.choice((8, 40)))
        for _ in range(rng.randrange(8)):
            disturbed(sim, rng, LATE)
            for _ in range(rng.randrange(60)):
                sim.random_move(rng)
    sim.run()
    check(sim)


def submit(sim: Simulation, rng: random.Random, number: int, max_tokens: int) -> None:
    prompt = rng.choice(PREFIXES) + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
    for choice in range(rng.choice((1, 1, 1, 3))):
        priority = rng.choice((0, 0, 1))
        sim.submit(f"r{number}.{choice}", prompt, max_tokens=rng.randrange(1, max_tokens), priority=priority)


def check(sim: Simulation) -> None:
    sim.check_at_rest()
    num_slots = min(w.member.num_blocks for w in sim.workers.values()) * BLOCK_SIZE
    for record in sim.records.values():
        fits = len(record.prompt) + record.max_tokens <= num_slots
        if record.outcome == "length" and fits:
            assert record.output == expected(record)
        assert record.outcome in ("length", "cancelled", "error")
        assert record.outcome != "error" or not fits
