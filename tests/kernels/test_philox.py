"""Philox against the known answers of its authors (Random123, kat_vectors)."""

from __future__ import annotations

import pytest
import torch

from kernels.philox import MASK, philox_4x32_10

KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((MASK,) * 4, (MASK, MASK), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([value]) for value in (*counter, *key))
    assert " ".join(f"{int(word):08x}" for word in philox_4x32_10((c0, c1, c2, c3), (k0, k1))) == words


def test_counters_and_keys_are_independent() -> None:
    def run(groups: list[int], keys: list[int]) -> torch.Tensor:
        c0, k0 = torch.tensor(groups), torch.tensor(keys).unsqueeze(1)
        seven, zero = torch.tensor([7]), torch.tensor([0])
        return torch.stack(philox_4x32_10((c0, seven, zero, zero), (k0, seven)))

    together = run(list(range(1000)), [3, 4])
    assert together.shape == (4, 2, 1000)
    assert torch.equal(run([999, 3], [4]), together[:, 1:, [999, 3]])
    assert together.unique().numel() > 7990  # 8,000 words of 32 bits hardly ever collide


def test_refuses_other_integers() -> None:
    c, k = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="int64"):
        philox_4x32_10((c, c, c, k), (c, c))
    with pytest.raises(TypeError, match="int64"):
        philox_4x32_10((c, c, c, c), (c, k))
