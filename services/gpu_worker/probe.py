"""Small steps for a sequence that nobody asked for: does the engine compute at all, and how fast?

Writes into one block, which must be nobody's, or its holder's no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from services.gpu_worker.batch import Chunk, Engine, Sequence
from services.gpu_worker.speculative.draft import chain
from services.gpu_worker.speculative.row_cost import RowCost
from services.gpu_worker.step_cost import StepCost
from shared.protocol import SamplingParams

TIMES = 3  # that rows are measured, of which the quickest counts
LONG_S = 0.1  # a step that takes so long is measured once: a start is not to take seconds more
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, seed=0)


def probe(engine: Engine, block_id: int, num_tokens: int = 1) -> None:
    """One step of num_tokens, which must fit into a block. Raises what the engine raises."""
    engine.step([Chunk(_sequence(block_id, num_tokens), 0, num_tokens, True)])


def _sequence(block_id: int, num_tokens: int) -> Sequence:
    return Sequence(
        sid="probe", epoch=0, choice=0, params=GREEDY, num_prompt_tokens=num_tokens, token_ids=[0] * num_tokens,
        block_ids=[block_id],
    )  # fmt: skip


def measure_rows(engine: Engine, clock: Callable[[], float] = time.monotonic) -> RowCost:
    """What few rows of a sequence cost, as far as they fit into a block."""
    cost = RowCost()
    for num_rows in (1, 2, 4, 8):
        if num_rows > engine.info.block_size:
            break
        seq = _sequence(0, 1)
        chunk = Chunk(seq, 0, 1, True, chain(range(1, num_rows)))
        times = TIMES if _seconds(engine, chunk, clock) < LONG_S else 1
        cost.observe(num_rows, min(_seconds(engine, chunk, clock) for _ in range(times)))
    return cost


def _seconds(engine: Engine, chunk: Chunk, clock: Callable[[], float]) -> float:
    started = clock()
    engine.step([chunk])
    return clock() - started


def measure(engine: Engine, clock: Callable[[], float] = time.monotonic) -> StepCost:
    """What steps cost, from a few on an empty pool; the first of each kind is not counted, since it warms things up."""
    cost = StepCost()
    for num_tokens in (engine.info.block_size, 1):
        probe(engine, 0, num_tokens)
        started = clock()
        probe(engine, 0, num_tokens)
        cost.observe(num_tokens == 1, num_tokens if num_tokens > 1 else 0, 0, clock() - started)
    return cost
