from __future__ import annotations

import pytest

from services.gpu_worker.probe import measure, measure_rows, probe
from services.gpu_worker.scripted_engine import ScriptedEngine
from services.gpu_worker.step_cost import FIRST_HANG_S


def test_a_new_engine_is_measured_before_anybody_waits_for_it() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds * (10 if len(slept) in (1, 3) else 1)  # the first of its kind is slow

    engine = ScriptedEngine(num_blocks=4, block_size=16, step_s=0.5, token_s=0.25, sleep=sleep)
    cost = measure(engine, lambda: now[0])
    assert cost.decode_s == pytest.approx(0.5) and cost.token_s == pytest.approx(4.5 / 16)
    assert cost.hang_s(100) == pytest.approx(5 * (0.5 + 100 * 4.5 / 16)) != FIRST_HANG_S
    assert cost.tokens_per_second == 0, "nobody has drawn anything yet"


def test_a_probe_raises_what_the_engine_raises() -> None:
    with pytest.raises(Exception, match="not in the pool"):
        probe(ScriptedEngine(num_blocks=4), block_id=4)


@pytest.mark.parametrize(("block_size", "most"), [(16, 8), (8, 8), (4, 4), (1, 1)])
def test_rows_are_measured_as_far_as_they_fit_into_a_block(block_size: int, most: int) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds * (10 if len(slept) % 2 else 1)

    engine = ScriptedEngine(num_blocks=4, block_size=block_size, step_s=0.5, token_s=0.25, sleep=sleep)
    cost = measure_rows(engine, lambda: now[0])
    assert cost.relative(most) / cost.relative(1) == pytest.approx((0.5 + 0.25 * (most - 1)) / 0.5)


@pytest.mark.parametrize(("step_s", "num_steps"), [(0.01, 16), (0.5, 8)])
def test_rows_that_take_long_are_measured_once(step_s: float, num_steps: int) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    measure_rows(ScriptedEngine(num_blocks=4, block_size=16, step_s=step_s, sleep=sleep), lambda: now[0])
    assert len(slept) == num_steps
