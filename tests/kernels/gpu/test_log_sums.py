"""Sums for log-probabilities in Triton: the specification's integers, and its best tokens in order."""

from __future__ import annotations

import pytest
import torch

from kernels.log_sums import log_sum, log_sums, log_sums_reference
from tests.kernels.gpu.checks import assert_rows_alone, randn, same_bits, strided


@pytest.mark.parametrize(("vocabulary", "num_best"), [(1, 1), (63, 0), (100, 20), (5000, 3)])
def test_against_the_specification(vocabulary: int, num_best: int) -> None:
    logits = strided(randn(3, vocabulary) * 6 + 2)
    got, want = log_sums(logits, num_best), log_sums_reference(logits, num_best)
    for mine, theirs in zip(got.tensors(), want.tensors(), strict=True):
        assert same_bits(mine, theirs)
    for row, largest, total in zip(logits, got.largest.tolist(), got.totals.tolist(), strict=True):
        assert log_sum(largest, total) == pytest.approx(float(row.double().logsumexp(0)), abs=1e-6)


def test_equal_logits_are_ranked_by_id() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [8999, 4096, 17]] = 2.0
    logits[0, 500] = 3.0
    logits[0, 1] = -0.0
    assert log_sums(logits, 6).best_ids.tolist() == [[500, 17, 4096, 8999, 0, 1]]


def test_a_row_is_summed_alone_as_among_others() -> None:
    assert_rows_alone(lambda x: [t.view(len(x), -1) for t in log_sums(x, 4).tensors()], randn(5, 100))


def test_refuses_other_shapes() -> None:
    for logits, num_best in ((randn(3), 1), (randn(2, 5).half(), 1), (randn(2, 5), 6)):
        with pytest.raises(ValueError, match="log_sums"):
            log_sums(logits, num_best)
