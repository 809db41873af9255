"""Block ids of a step's sequences as arrays: read from a sequence's list once, and again only where it has changed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.gpu_worker.batch import Sequence
from services.gpu_worker.step_inputs import check_blocks

Ids = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Row:
    seq: Sequence  # kept, so that its id() stays its own
    known: list[int]
    ids: Ids  # of known, with room for more


class BlockTables:
    """Remembers the sequences of the last step. A list may grow, and its elements be replaced."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def table(self, sequences: Seq[Sequence], nums: Seq[int], num_blocks: int) -> Ids:
        """[sequences, most blocks]: the first of each sequence's blocks, as many as `nums` says, and zeros.

        SequenceError for a block outside a pool of num_blocks."""
        table = np.zeros((len(sequences), max(nums)), dtype=np.int32)
        for line, seq, num in zip(table, sequences, nums, strict=True):
            line[:num] = self._row(seq, num_blocks).ids[:num]
        return table

    def keep(self, sequences: Seq[Sequence]) -> None:
        """Forgets all others."""
        self._rows = {id(seq): self._rows[id(seq)] for seq in sequences if id(seq) in self._rows}

    def _row(self, seq: Sequence, num_blocks: int) -> _Row:
        row = self._rows.get(id(seq))
        if row is not None and row.known == seq.block_ids:
            return row
        known = len(row.known) if row is not None else 0
        if row is None or seq.block_ids[:known] != row.known:
            row, known = _Row(seq, [], np.zeros(0, dtype=np.int32)), 0
        new = seq.block_ids[known:]
        check_blocks(seq.sid, new, num_blocks)
        if known + len(new) > len(row.ids):
            row.ids = np.concatenate([row.ids[:known], np.zeros(2 * (known + len(new)) - known, dtype=np.int32)])
        row.ids[known : known + len(new)] = new
        row.known += new
        self._rows[id(seq)] = row
        return row
