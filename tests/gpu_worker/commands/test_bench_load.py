from __future__ import annotations

import pytest

from services.gpu_worker.commands.bench_load import EngineBench, Request
from services.gpu_worker.composer import Budget
from services.gpu_worker.scripted_engine import ScriptedEngine
from tests.gpu_worker.guesser import Guesser


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("policy", ["continuous", "fixed"])
def test_every_wanted_token_counts_once_however_many_a_step_draws(policy: str, num_drafts: int) -> None:
    engine = ScriptedEngine(num_blocks=64, block_size=4)
    bench = EngineBench(engine, Budget(64, 16, 64), 1.0, drafter=Guesser(num_drafts, wrong_every=3))
    todo = [Request([n, 1, 2, 3, 4], max_tokens=5 + 3 * n) for n in range(5)]
    result = bench.run(todo, 2, policy)
    assert result.num_output_tokens == sum(request.max_tokens for request in todo)
    assert len(result.ttft_s) == len(todo)
