"""Classical rejection sampling over drafts, chain and tree: for comparison with verification by equal noise. *Pure.*

A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); else a token is drawn from what of p
lies above q, in proportion. What comes out is distributed as p, whatever q is: "Fast Inference from Transformers via
Speculative Decoding" (Leviathan et al., 2023). At a node of a tree the children are tried one after the other, each
against what the ones before have left of p ("SpecInfer", Miao et al., 2024).

No engine uses it. It accepts somewhat more drafts than equal noise does, but which token comes out of it depends on
what was drafted, and so on how many drafts a step had room for: the same request and seed give other text beside other
requests. Uniform numbers come in as arguments; a row of the arrays is a draw of its own, and rows do not mix.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def draw(p: Floats, uniform: Floats) -> Ids:
    """A token a row. p: [N, V], not negative, its rows need not add up to 1; uniform: [N]."""
    ends = np.cumsum(p, axis=1)
    return np.asarray((ends <= uniform[:, None] * ends[:, -1:]).sum(axis=1).clip(max=p.shape[1] - 1), dtype=np.int64)


def verify_token(p: Floats, q: Floats, draft: Ids, uniform: Floats) -> tuple[NDArray[np.bool_], Floats]:
    """Whether each row's draft is accepted; and what is to be drawn from where it is not. p, q: [N, V], q that from
    which it was drawn; draft, uniform: [N]."""
    rows = np.arange(len(draft))
    accepted = uniform * q[rows, draft] < p[rows, draft]
    rest = np.maximum(p - q, 0.0)
    total = rest.sum(axis=1, keepdims=True)
    # p = q rejects nothing but by rounding, and then p itself is as good
    return accepted, np.where(total > 0.0, rest / np.where(total > 0.0, total, 1.0), p)


def verify_chain(p: Seq[Floats], q: Seq[Floats], drafts: Seq[Ids], uniform: Floats) -> list[Ids]:
    """Tokens by position, -1 where a row has ended before: drafts up to the first that is rejected, and one more.

    p: of each position [N, V], given the drafts before it, one more than drafts; uniform: [N, 2 * len(p)]."""
    num_rows = len(uniform)
    alive = np.ones(num_rows, dtype=bool)
    tokens = []
    for position, target in enumerate(p):
        token, accepted = np.full(num_rows, -1, dtype=np.int64), np.zeros(num_rows, dtype=bool)
        rest = target
        if position < len(drafts):
            accepted, rest = verify_token(target, q[position], drafts[position], uniform[:, 2 * position])
            token[alive & accepted] = drafts[position][alive & accepted]
        ends = alive & ~accepted
        token[ends] = draw(rest, uniform[:, 2 * position + 1])[ends]
        tokens.append(token)
        alive &= accepted
    return tokens


def verify_children(p: Floats, q: Floats, drafts: Seq[Ids], uniform: Floats) -> tuple[Ids, Ids]:
    """At one node: the token of each row, and which child it is, -1 where none was accepted. drafts: [N] each, drawn
    from q one by one, apart from each other; uniform: [N, len(drafts) + 1]."""
    num_rows = len(uniform)
    token, child = np.full(num_rows, -1, dtype=np.int64), np.full(num_rows, -1, dtype=np.int64)
    rest = p
    for number, draft in enumerate(drafts):
        accepted, left = verify_token(rest, q, draft, uniform[:, number])
        new = accepted & (child < 0)
        token[new], child[new] = draft[new], number
        rest = np.where((child < 0)[:, None], left, rest)
    none = child < 0
    token[none] = draw(rest, uniform[:, -1])[none]
    return token, child
