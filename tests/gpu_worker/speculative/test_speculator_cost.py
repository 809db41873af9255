"""What guessing from texts takes of a worker's time, simulated: reading takes as long as a clock of ours says."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from services.gpu_worker.batch import Chunk, SampledToken
from services.gpu_worker.speculative import speculator as speculator_module
from services.gpu_worker.speculative.draft import NO_DRAFT, chain
from services.gpu_worker.speculative.proposer import Guessed
from services.gpu_worker.speculative.purse import SHARE
from services.gpu_worker.speculative.speculator import KEPT_STEPS, Speculator
from services.gpu_worker.speculative.suffix import SuffixProposer
from shared.speculative_config import SpeculativeConfig
from tests.gpu_worker.speculative.test_speculator import known_cost, make_sequence, words

CONFIG = SpeculativeConfig(method="suffix", num_speculative_tokens=16)
STEP_S = 0.006


class Work:
    def __init__(self, token_s: float) -> None:
        self.now_s = 0.0
        self.num_tokens = 0
        self._token_s = token_s

    def has_read(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.now_s += num_tokens * self._token_s


def counted(monkeypatch: pytest.MonkeyPatch, token_s: float) -> Work:
    work = Work(token_s)

    class Counted(SuffixProposer):
        def follow(self, ids: Seq[int]) -> list[Guessed]:
            work.has_read(len(ids))
            return super().follow(ids)

    monkeypatch.setattr(speculator_module, "SuffixProposer", Counted)
    return work


@pytest.mark.parametrize("num_sequences", [1, 32])
@pytest.mark.parametrize("token_s", [1e-6, 5e-5])
def test_however_long_reading_takes_it_takes_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, num_sequences: int, token_s: float
) -> None:
    work, rng = counted(monkeypatch, token_s), random.Random(1)
    speculator = Speculator(CONFIG, known_cost(lambda num_rows: STEP_S), clock=lambda: work.now_s)
    sequences = [make_sequence(words(rng, 50), n) for n in range(num_sequences)]
    for _ in range(1000):
        chunks = [Chunk(s, len(s.token_ids) - 1, 1, True) for s in sequences]
        speculator.draft(chunks, [100] * num_sequences, 256)
        speculator.observe(chunks, [(SampledToken(0),)] * num_sequences, STEP_S)
        for seq in sequences:
            seq.token_ids += words(rng, 1)
    once_s = 60 * num_sequences * token_s  # what was begun is read to its end
    assert 0.0 < work.now_s < SHARE * 1000 * STEP_S + KEPT_STEPS * STEP_S + once_s


def test_where_no_row_can_pay_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    work = counted(monkeypatch, 0.0)
    text = words(random.Random(2), 60)
    dear, cheap = (Speculator(CONFIG, known_cost(cost)) for cost in (lambda n: 0.001 * n, lambda n: 0.01 + 1e-4 * n))
    chunks = [Chunk(make_sequence(text + text[:20], n), 79, 1, True) for n in range(4)]
    assert dear.draft(chunks, [8] * 4, 64) == [NO_DRAFT] * 4 and work.num_tokens == 0
    assert cheap.draft(chunks, [8] * 4, 64) == [chain(text[20:28])] * 4 and work.num_tokens == 320
