"""Masks of tokens in Triton: the specification's bits, and no other row changed."""

from __future__ import annotations

import pytest
import torch

from kernels.token_mask import forbid_, forbid_reference_, num_words
from tests.kernels.gpu.checks import randn, same_bits, strided


@pytest.mark.parametrize("vocabulary", [1, 32, 63, 100, 5000])
def test_bits_are_the_specifications(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    masks = torch.randint(-(1 << 31), 1 << 31, (2, num_words(vocabulary)), generator=generator).int()
    logits, rows = strided(randn(5, vocabulary)), torch.tensor([3, 0], dtype=torch.int32)
    want = logits.clone()
    forbid_reference_(want, rows, masks)
    forbid_(logits, rows, masks)
    assert same_bits(logits, want) and logits[[1, 2, 4]].isfinite().all()


def test_bits_stand_for_tokens_from_the_lowest_on() -> None:
    logits = torch.zeros(2, 40)
    forbid_(logits, torch.tensor([1], dtype=torch.int32), torch.tensor([[0b101, -(1 << 31) + 2]], dtype=torch.int32))
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 2, 33] and logits[0].isfinite().all()


def test_refuses_other_shapes() -> None:
    rows, masks = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    for logits, own_rows in ((randn(2, 32), rows), (randn(2, 40).half(), rows), (randn(2, 40), rows.long())):
        with pytest.raises(ValueError, match="forbid_"):
            forbid_(logits, own_rows, masks)
