"""Single point of control for one pool's blocks: who holds which, which are shared, which are free. *Pure.*

Calls are states, not increments: repeated, they change nothing and give the same answer. Each carries `order`, the
number of the call, which rises with every new call of a run term; a call never undoes what a later one did (see
`holds`). A block is in one of these places: free; in the spare grant; in the table of one sequence (private); in the
tables of any number (sealed, in the prefix index); retired by a sequence whose `Remap` is on its way.

A prompt of whole blocks that is sealed completely still needs the logits of its last token. Its last block is not
shared: it is computed again, in a private block, and becomes one with its twin when it is sealed. So a cached length
is always a multiple of block_size and less than the prompt, and nobody ever writes into a block that others can see.

Knows nothing of messages, terms or workers; refuses what does not fit instead of raising.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from services.cache_store import invariants
from services.cache_store.block_pool import BlockPool
from services.cache_store.holds import Counts, Endings, Ensured, Hold, Retired, Running, Sealed, count_uses
from services.cache_store.prefix_index import Entry, Leaders, PrefixIndex
from shared.block_keys import chain, root_key
from shared.store_calls import InventoryEntry
from shared.wire import pack_ids

log = logging.getLogger(__name__)


class BlockManager:
    """Attributes are for reading; only methods change them."""

    def __init__(self, num_blocks: int, block_size: int, variant: str) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.variant = variant
        self.counts = Counts()
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.leaders = Leaders()
        self.holds: dict[str, Hold] = {}
        self.spares: dict[int, int] = {}  # block -> order of the last `grant` that answered with it
        self.unproven: set[int] = set()  # in several tables by the worker's word, and not sealed here yet
        self._granted_at = -1
        self._endings = Endings()
        self._index_from_worker = False  # rebuilt from an inventory, and not reconciled since

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def table(self, sid: str, epoch: int) -> tuple[int, ...]:
        """Blocks that (sid, epoch) holds, by index; empty if it holds none."""
        hold = self.holds.get(sid)
        return tuple(hold.block_ids) if hold is not None and hold.epoch == epoch else ()

    # --- sequences ---------------------------------------------------------------------------------------------------

    def ensure(
        self,
        sid: str,
        epoch: int,
        salt: bytes,
        packed_ids: bytes,
        order: int,
        *,
        wait_for_leader: bool = True,
        use_cached: bool = True,
        keep_free: int = 0,
    ) -> Ensured:
        """Match, reference and allocate blocks for these tokens and one more, in one step.

        A higher epoch ends what the sequence held under a lower one, whatever the answer.
        """
        num_tokens = len(packed_ids) // 4
        known = self.holds.get(sid)
        if known is not None and known.epoch == epoch:
            known.order = max(known.order, order)
            cached_length = min(known.cached_length, self._num_shareable(num_tokens) * self.block_size)
            return Ensured("ok", tuple(known.block_ids), cached_length)
        if self._endings.is_over(sid, epoch, order) or (known is not None and known.epoch > epoch):
            return Ensured("stale")
        if known is not None:
            self._let_go(known)
        self._endings.record(sid, epoch - 1, order)
        root = root_key(salt, self.variant)
        keys = chain(root, packed_ids, self.block_size)
        shareable = keys[: self._num_shareable(num_tokens)] if use_cached else []
        matched = self.index.match(shareable, packed_ids, 4 * self.block_size)
        leader = self.leaders.find(shareable[len(matched) :]) if wait_for_leader else None
        if leader is not None:
            self.counts.waits += 1
            return Ensured("wait", leader=leader[0], leader_index=leader[1])
        hold = Hold(sid, epoch, root, order, matched, keys[: len(matched)], len(matched) * self.block_size)
        return self._open(hold, keys, num_tokens, keep_free)

    def _open(self, hold: Hold, keys: list[bytes], num_tokens: int, keep_free: int) -> Ensured:
        """Makes a hold of matched blocks complete and real, if there is room for it."""
        num_matched = len(hold.block_ids)
        num_private = num_tokens // self.block_size + 1 - num_matched
        num_needed = num_private + sum(self.pool.num_refs(b) == 0 for b in hold.block_ids)
        if num_needed + keep_free > self.num_free:
            return Ensured("full", num_needed=num_needed)
        for block_id in hold.block_ids:
            self.pool.add_ref(block_id)
        hold.block_ids += self._allocate(num_private)
        self.holds[hold.sid] = hold
        self.leaders.lead(hold.sid, keys[num_matched:], num_matched)
        self.counts.query_tokens += num_tokens
        self.counts.hit_tokens += hold.cached_length
        return Ensured("ok", tuple(hold.block_ids), hold.cached_length)

    def match(self, salt: bytes, packed_ids: bytes) -> int:
        """How many tokens `ensure` would find sealed now; changes nothing, not even the order of eviction."""
        keys = chain(root_key(salt, self.variant), packed_ids, self.block_size)
        shareable = keys[: self._num_shareable(len(packed_ids) // 4)]
        return self.block_size * len(self.index.match(shareable, packed_ids, 4 * self.block_size))

    def take(self, sid: str, epoch: int, index: int, block_id: int, order: int) -> bool:
        """The worker used a spare block as the sequence's next; returns whether the sequence has it there.

        If the sequence has ended meanwhile (a later call has overtaken this one), the block is free with the others.
        """
        hold = self._hold_of(sid, epoch, order)
        if hold is not None and hold.has(index, block_id):
            return True
        if hold is None and self._endings.is_known(sid, epoch):
            self.reclaim([block_id], order)
            return False
        if hold is None or index != len(hold.block_ids) or block_id not in self.spares:
            self.counts.refused_takes += 1
            log.warning("take refused: block %s as number %s of %s.e%s", block_id, index, sid, epoch)
            return False
        del self.spares[block_id]
        hold.block_ids.append(block_id)
        return True

    def seal(self, sid: str, epoch: int, index: int, block_id: int, ids: Sequence[int], order: int) -> Sealed:
        """The block is full and will not change: others may share it, unless there is an equal one already."""
        hold = self._hold_of(sid, epoch, order)
        if hold is None or len(ids) != self.block_size or not hold.has(index, block_id) or index > len(hold.keys):
            return self._refuse_seal(sid, epoch, index, block_id)
        parent = hold.keys[index - 1] if index else hold.root
        packed = pack_ids(ids)
        entry = Entry(chain(parent, packed, self.block_size)[0], parent, packed)
        if index == len(hold.keys):
            return self._seal_next(hold, block_id, entry, order)
        if entry.key != hold.keys[index]:
            return self._refuse_seal(sid, epoch, index, block_id)
        retired = hold.retired.get(block_id)
        if retired is None:
            return Sealed(True)
        retired.order = max(retired.order, order)
        return Sealed(True, hold.block_ids[index])

    def _seal_next(self, hold: Hold, block_id: int, entry: Entry, order: int) -> Sealed:
        index = len(hold.keys)
        twin = self.index.find(entry.key)
        known = self.index.entry(block_id if twin is None else twin)
        if known is not None and known != entry:
            # Equal keys of other tokens, or one block sealed as two things. The sequence's keys end here, since keys
            # of its further blocks would lead others to them from the wrong beginning.
            self.counts.collisions += 1
            log.error("block %s of %s.e%s collides with block %s", block_id, hold.sid, hold.epoch, twin)
            return Sealed(False)
        self.counts.seals += 1
        hold.keys.append(entry.key)
        if twin is None:
            self.index.add(block_id, entry)
        if twin is None or twin == block_id:
            return Sealed(True)
        self.pool.add_ref(twin)
        hold.block_ids[index] = twin
        hold.retired[block_id] = Retired(index, order)
        self.counts.remaps += 1
        return Sealed(True, twin)

    def _refuse_seal(self, sid: str, epoch: int, index: int, block_id: int) -> Sealed:
        self.counts.refused_seals += 1
        log.info("seal refused: block %s as number %s of %s.e%s", block_id, index, sid, epoch)
        return Sealed(False)

    def drop(self, sid: str, epoch: int, block_id: int, order: int) -> None:
        """The `Remap` that retires the block is in the worker's plan."""
        hold = self._hold_of(sid, epoch, order)
        if hold is not None and block_id in hold.retired and hold.retired[block_id].order < order:
            del hold.retired[block_id]
            self._drop_ref(block_id)

    def release(self, sid: str, epoch: int, order: int) -> None:
        """The worker does not run (sid, epoch) any more, or never will."""
        hold = self._hold_of(sid, epoch, order)
        if hold is not None:
            self._let_go(hold)
        self._endings.record(sid, epoch, order)

    # --- the spare grant ---------------------------------------------------------------------------------------------

    def grant(self, num_blocks: int, order: int) -> tuple[int, ...]:
        """The worker's spare blocks, num_blocks of them if so many can be had; takes none away.

        An older or repeated call is answered with the present ones.
        """
        if order > self._granted_at:
            self._granted_at = order
            num_missing = max(0, num_blocks - len(self.spares))
            new = self._allocate(min(num_missing, self.num_free))
            self.spares = dict.fromkeys([*self.spares, *new], order)
        return tuple(self.spares)

    def reclaim(self, block_ids: Iterable[int], order: int) -> None:
        """These are not the worker's spares any more; those it has taken meanwhile stay where they are."""
        for block_id in block_ids:
            if self.spares.get(block_id, order) < order:
                del self.spares[block_id]
                self._drop_ref(block_id)

    # --- by the worker's word ----------------------------------------------------------------------------------------

    def rebuild(self, inventory: Iterable[InventoryEntry]) -> int:
        """Fill a new manager's index from the worker's inventory; returns how many entries were skipped as wrong."""
        assert not self.holds and not self.spares and not len(self.index)
        num_wrong = self.index.load(inventory, self.num_blocks, self.block_size)
        for block_id in self.index.leaves_first():
            self.pool.mark_cached(block_id)
        self._index_from_worker = True
        return num_wrong

    def reconcile(self, running: Sequence[Running], spares: Iterable[int], order: int) -> None:
        """Set the references to exactly this; ValueError, with nothing changed, for a running set that cannot be.

        A rebuilt index is not believed about blocks that the worker may write into: it may still list what they held
        before. The seals that follow a reconcile bring them back.
        """
        uses = count_uses(running, self.num_blocks)
        spare_ids = [b for b in dict.fromkeys(spares) if b not in uses]
        if any(not 0 <= b < self.num_blocks for b in spare_ids):
            raise ValueError("a spare block that the pool does not have")
        before = [b for hold in self.holds.values() for b in hold.all_ids()] + list(self.spares)
        for block_id in [*uses.elements(), *spare_ids]:
            self.pool.add_ref(block_id)
        self.holds = {sid: self._reported(sid, epoch, salt, ids, order) for sid, epoch, salt, ids in running}
        proven = {b for hold in self.holds.values() for b in hold.block_ids[: len(hold.keys)]}
        for block_id in [*uses, *spare_ids]:
            if block_id not in proven:
                self.index.remove(block_id)
        for block_id in before:
            self._drop_ref(block_id)
        self.unproven = {b for b, num_uses in uses.items() if num_uses > 1 and b not in self.index}
        self.spares = dict.fromkeys(spare_ids, order)
        self.leaders = Leaders()
        self._granted_at = order
        self._endings.reset(order)
        self._index_from_worker = False

    def _reported(self, sid: str, epoch: int, salt: bytes, block_ids: Sequence[int], order: int) -> Hold:
        root = root_key(salt, self.variant)
        keys = [] if self._index_from_worker else self.index.chain(root, block_ids)
        return Hold(sid, epoch, root, order, list(block_ids), keys, len(keys) * self.block_size)

    # --- inside ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """AssertionError when the parts contradict each other; O(blocks), for tests and idle times."""
        invariants.check(self)

    def _num_shareable(self, num_tokens: int) -> int:
        """Whole blocks before the one of the last token, which is always computed."""
        return (num_tokens - 1) // self.block_size

    def _hold_of(self, sid: str, epoch: int, order: int) -> Hold | None:
        """What (sid, epoch) holds, unless a call of this order is about an earlier life of it."""
        hold = self.holds.get(sid)
        return hold if hold is not None and hold.epoch == epoch and hold.order < order else None

    def _allocate(self, count: int) -> list[int]:
        block_ids = self.pool.allocate(count)
        self.counts.evictions += sum(map(self.index.remove, block_ids))
        return block_ids

    def _drop_ref(self, block_id: int) -> None:
        if self.pool.drop_ref(block_id, cached=block_id in self.index):
            self.unproven.discard(block_id)

    def _let_go(self, hold: Hold) -> None:
        for block_id in hold.all_ids():
            self._drop_ref(block_id)
        self.leaders.forget(hold.sid)
        del self.holds[hold.sid]
