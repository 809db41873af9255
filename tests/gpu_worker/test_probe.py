from __future__ import annotations

import pytest

from services.gpu_worker.probe import measure, probe
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
