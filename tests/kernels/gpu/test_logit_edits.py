"""Edits of logits in Triton: the specification's bits, and nothing else changed."""

from __future__ import annotations

import pytest
import torch

from kernels.logit_edits import BANNED, SEEN, LogitEdits, edit_logits_, edit_logits_reference_
from tests.kernels.gpu.checks import randn, same_bits, strided


def edits_of(num_edits: int, num_rows: int, vocabulary: int) -> LogitEdits:
    generator = torch.Generator().manual_seed(num_edits)
    places = torch.randperm(num_rows * vocabulary, generator=generator)[:num_edits]
    flags = torch.randint(0, 4, (num_edits,), generator=generator)
    counts = torch.randint(0, 4, (num_edits,), generator=generator)
    return LogitEdits(
        (places // vocabulary).int(), (places % vocabulary).int(), randn(num_edits, seed=1), flags.int(), counts.int(),
        torch.stack((1.0 + randn(num_rows).abs(), randn(num_rows, seed=2), randn(num_rows, seed=3)), 1),
    )  # fmt: skip


@pytest.mark.parametrize("num_edits", [1, 63, 300])
def test_bits_are_the_specifications(num_edits: int) -> None:
    edits = edits_of(num_edits, 5, 100)
    logits = strided(randn(5, 100) * 5)
    want = logits.clone()
    edit_logits_reference_(want, edits)
    edit_logits_(logits, edits)
    assert same_bits(logits, want)


def test_each_part_does_what_it_says() -> None:
    def edited(x: float, bias: float = 0.0, flags: int = 0, count: int = 0) -> float:
        logits = torch.full((2, 3), x)
        fields = [torch.tensor([v], dtype=torch.int32) for v in (1, 2, flags, count)]
        penalties = torch.tensor([[9.0, 9.0, 9.0], [2.0, 0.5, 0.25]])
        edit_logits_(logits, LogitEdits(*fields[:2], torch.tensor([bias]), *fields[2:], penalties))
        assert (logits == x).sum() >= 5
        return float(logits[1, 2])

    assert edited(3.0, bias=0.5) == 3.5
    assert edited(3.0, flags=BANNED) == -torch.inf
    assert edited(3.0, flags=SEEN) == 1.5 and edited(-3.0, flags=SEEN) == -6.0
    assert edited(3.0, count=2) == 1.75
    assert edited(3.0, bias=1.0, flags=SEEN, count=1) == 1.25


def test_refuses_other_shapes() -> None:
    edits = edits_of(4, 5, 100)
    for logits in (randn(4, 100), randn(5, 100).half(), randn(100, 5).t()):
        with pytest.raises(ValueError, match="edit_logits_"):
            edit_logits_(logits, edits)
