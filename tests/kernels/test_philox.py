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
    c0, c1, c2, c3 = (torch.tensor([value]) for value in counter)
    assert " ".join(f"{int(word):08x}" for word in philox_4x32_10((c0, c1, c2, c3), key)) == words


def test_counters_are_independent() -> None:
    def run(groups: list[int]) -> torch.Tensor:
        c0 = torch.tensor(groups)
        rest = [torch.full_like(c0, value) for value in (7, 1, 0)]
        return torch.stack(philox_4x32_10((c0, rest[0], rest[1], rest[2]), (3, 4)))

    together = run(list(range(1000)))
    assert torch.equal(run([999, 3]), together[:, [999, 3]])
    assert together.unique().numel() > 3990  # 4,000 words of 32 bits hardly ever collide


def test_refuses_other_integers() -> None:
    c = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="int64"):
        philox_4x32_10((c, c, c, c), (0, 0))
    d = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="uint32"):
        philox_4x32_10((d, d, d, d), (0, 1 << 32))
