"""How changes of the plan hand blocks over: spare grants, and what single sequences gain and exchange. *Pure.*

No block gets two writers: what is handed over to be written must be free here, and what comes in the place of another
must be sealed here under the same key.
"""

from __future__ import annotations

import logging
from collections import Counter

from services.gpu_worker.batch import Sequence
from services.gpu_worker.block_map import BlockMap
from services.gpu_worker.outbox import Outbox
from services.gpu_worker.seals import SealedBlocks
from shared.worker_protocol import Extend, Reclaim, Remap

log = logging.getLogger(__name__)


class BlockChanges:
    def __init__(self, blocks: BlockMap, sealed: SealedBlocks, outbox: Outbox, counts: Counter[str]) -> None:
        self._blocks = blocks
        self._sealed = sealed
        self._outbox = outbox
        self._counts = counts

    def reclaim(self, message: Reclaim) -> None:
        self._blocks.spares.difference_update(message.block_ids)
        self._outbox.touch()  # those that are still listed, or taken, tell which came too late

    def grant(self, message: Extend) -> None:
        for block_id in message.block_ids:
            if self._blocks.is_free(block_id):
                self._sealed.forget([block_id])
                self._blocks.spares.add(block_id)
            elif block_id not in self._blocks.spares:
                self._counts["refused_spares"] += 1
                log.warning("block %s of a spare grant is another's", block_id)

    def apply(self, seq: Sequence, message: Extend | Remap) -> bool:
        """False: it cannot be; then the scheduler and this worker disagree about the sequence's blocks."""
        return self._remap(seq, message) if isinstance(message, Remap) else self._extend(seq, message)

    def _extend(self, seq: Sequence, message: Extend) -> bool:
        new = [b for b in dict.fromkeys(message.block_ids) if b not in seq.block_ids]  # the rest is a repeat
        if not all(map(self._blocks.is_free, new)):
            return False
        self._sealed.forget(new)
        self._blocks.hold(seq.sid, new)
        seq.block_ids += new
        return True

    def _remap(self, seq: Sequence, message: Remap) -> bool:
        index, new = message.index, message.block_id
        if not 0 <= index < seq.num_sealed or self._sealed.key_of(new) != seq.keys[index] or new in self._blocks.spares:
            return False
        old = seq.block_ids[index]
        if old != new:
            self._blocks.release(seq.sid, [old])
            self._blocks.hold(seq.sid, [new])
            seq.block_ids[index] = new
        return True
