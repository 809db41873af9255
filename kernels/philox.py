"""Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): counter and key in, 128 bits out.

The words are uint32 values held in int64, the widest integer torch computes with everywhere. A product of two of
them wraps as a signed int64, which leaves its 64 bits, and so both halves, right.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Key = tuple[torch.Tensor, torch.Tensor]


def philox_4x32_10(counter: Words, key: Key) -> Words:
    """Four output words for each counter and key; all six tensors broadcast against each other."""
    if any(word.dtype != torch.int64 for word in (*counter, *key)):
        raise TypeError("philox_4x32_10: counter and key words must be int64 tensors")
    return philox_4x32_10_reference(counter, key)


def philox_4x32_10_reference(counter: Words, key: Key) -> Words:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # The arithmetic shift brings copies of the sign bit, which the mask removes.
        c0, c2 = (product1 >> 32) & MASK ^ c1 ^ k0, (product0 >> 32) & MASK ^ c3 ^ k1
        c1, c3 = product1 & MASK, product0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3
