"""A store whose calls are lost, repeated and overtaken, across terms: no block ever has two writers, every hit is true.

The worker and its scheduler are one object here, for the plan stream keeps its order; only what travels to the store
and back is disturbed. Everything ever sent may be delivered at any later time, any number of times, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.cache_store.store_core import StoreCore
from shared.block_keys import chain, root_key
from shared.store_calls import (
    Ensure,
    Grant,
    Granted,
    Inventory,
    InventoryEntry,
    Reconcile,
    Reconciled,
    StoreCall,
    Table,
    Update,
    Updated,
)
from shared.wire import pack_ids
from shared.worker_protocol import Seal, Taken

SIZE = 2
NUM_BLOCKS = 10
SALT = bytes(32)
Tokens = tuple[int, ...]

sids = st.sampled_from("abc")
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


@dataclass
class Sequence:
    epoch: int
    ids: Tokens
    table: list[int]
    num_sealed: int

    def prefix(self, index: int) -> Tokens:
        return self.ids[: (index + 1) * SIZE]


class StoreCoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.core = StoreCore("s")
        self.number = self.run_term = self.pool_term = 0
        self.network: list[StoreCall] = []
        self.pending: dict[int, StoreCall] = {}
        self.ready = False
        self.epochs: dict[str, int] = {}
        self.running: dict[str, Sequence] = {}
        self.worker_spares: set[int] = set()
        self.known_spares: set[int] = set()  # as the scheduler knows them
        self.memory: dict[int, Tokens] = {}  # sealed blocks, as the worker lists them
        self.restart_store()

    # --- worker and scheduler ----------------------------------------------------------------------------------------

    def send(self, kind: type[StoreCall], **fields: Any) -> None:
        self.number += 1
        terms = {"call": self.number, "run_term": self.run_term, "pool_term": self.pool_term}
        message = kind(reply_to="r", worker="w", **terms, **fields)
        self.network.append(message)
        self.pending[self.number] = message

    def used(self) -> set[int]:
        return {b for s in self.running.values() for b in s.table} | self.worker_spares

    @rule()
    def take_over(self) -> None:
        """By another scheduler; the worker reports what it has, and its seals again."""
        self.run_term += 1
        self.reconcile_again()

    @rule()
    def reconcile_again(self) -> None:
        self.ready = False
        self.pending.clear()
        self.known_spares = set(self.worker_spares)
        rows = tuple((sid, s.epoch, SALT, tuple(s.table)) for sid, s in self.running.items())
        self.send(Reconcile, running=rows, spare_block_ids=tuple(self.worker_spares))
        seals = tuple(
            Seal(sid=sid, epoch=s.epoch, index=i, block_id=s.table[i], ids=s.prefix(i)[-SIZE:])
            for sid, s in self.running.items()
            for i in range(s.num_sealed)
        )
        self.send(Update, seals=seals)

    @rule()
    def restart_store(self) -> None:
        self.pool_term += 1
        self.core.open_pool("w", self.pool_term, NUM_BLOCKS, SIZE, "v", self.run_term)
        blocks = []
        for block_id, prefix in self.memory.items():
            root = root_key(SALT, "v")
            *parents, key = [root, *chain(root, pack_ids(prefix), SIZE)]
            ids = pack_ids(prefix[-SIZE:])
            blocks.append(InventoryEntry(block_id=block_id, key=key, parent_key=parents[-1], ids=ids))
        self.core.handle(Inventory(worker="w", pool_term=self.pool_term, blocks=tuple(blocks), last=True))
        self.reconcile_again()

    @precondition(lambda self: self.ready)
    @rule(sid=sids, ids=prompts, wait=st.booleans())
    def ask(self, sid: str, ids: Tokens, wait: bool) -> None:
        if sid not in self.running:
            epoch = self.epochs.get(sid, 0) + 1
            self.send(Ensure, sid=sid, epoch=epoch, salt=SALT, ids=pack_ids(ids), wait_for_leader=wait)

    @precondition(lambda self: self.ready)
    @rule(num_blocks=st.integers(1, 3))
    def ask_for_spares(self, num_blocks: int) -> None:
        self.send(Grant, num_blocks=num_blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, token: int) -> None:
        """The worker fills the next block of a sequence, taking a spare one where it has none."""
        sid = data.draw(st.sampled_from(sorted(self.running)))
        s = self.running[sid]
        index, taken = s.num_sealed, []
        if index == len(s.table):
            if not self.worker_spares:
                return
            s.table.append(self.worker_spares.pop())
            taken.append(Taken(sid=sid, epoch=s.epoch, index=index, block_id=s.table[index]))
        while len(s.ids) < (index + 1) * SIZE:
            s.ids += (token,)
        block_id = s.table[index]
        others = {b for other, o in self.running.items() for b in o.table if other != sid} | self.worker_spares
        assert block_id not in others, "two writers"
        self.memory.pop(block_id, None)
        self.memory[block_id] = s.prefix(index)
        s.num_sealed += 1
        seal = Seal(sid=sid, epoch=s.epoch, index=index, block_id=block_id, ids=s.prefix(index)[-SIZE:])
        self.send(Update, taken=tuple(taken), seals=(seal,))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sid = data.draw(st.sampled_from(sorted(self.running)))
        self.send(Update, released=((sid, self.running.pop(sid).epoch),))

    @precondition(lambda self: self.worker_spares and not any(isinstance(m, Grant) for m in self.pending.values()))
    @rule()
    def reclaim(self) -> None:
        """Not while a grant is asked for: its answer would seem to give the block again."""
        block_id = self.worker_spares.pop()
        self.known_spares.discard(block_id)
        self.send(Update, reclaimed=(block_id,))

    # --- the network -------------------------------------------------------------------------------------------------

    @rule(data=st.data(), lost=st.booleans())
    def deliver(self, data: st.DataObject, lost: bool) -> None:
        newest = len(self.network) - 1
        back = data.draw(st.one_of(st.integers(0, min(3, newest)), st.integers(0, newest)))
        self.deliver_one(self.network[newest - back], lost)

    @rule()
    def deliver_everything_in_order(self) -> None:
        for call in sorted(self.pending):
            if call in self.pending:
                self.deliver_one(self.pending[call], lost=False)

    def deliver_one(self, message: StoreCall, lost: bool) -> None:
        ((_, answer),) = self.core.handle(message)
        if lost or answer.call not in self.pending:  # type: ignore[attr-defined]
            return
        del self.pending[answer.call]  # type: ignore[attr-defined]
        match answer:
            case Table(status="ok"):
                self.admit(answer, message)
            case Granted(status="ok"):
                new = set(answer.spare_block_ids) - self.known_spares
                self.known_spares |= new
                self.worker_spares |= {b for b in new if all(b not in s.table for s in self.running.values())}
            case Updated(status="ok"):
                assert isinstance(message, Update)
                self.known_spares -= {t.block_id for t in message.taken}
                self.remap(answer)
            case Reconciled(status="ok"):
                self.ready = True

    def admit(self, table: Table, message: StoreCall) -> None:
        running = self.running.get(table.sid)
        if running is not None and running.epoch == table.epoch:
            return  # asked twice
        if running is not None or table.epoch != self.epochs.get(table.sid, 0) + 1:
            self.send(Update, released=((table.sid, table.epoch),))
            return
        assert isinstance(message, Ensure)
        bits = message.ids[::4]
        ids, num_cached = tuple(bits), table.cached_length // SIZE
        s = Sequence(table.epoch, ids, list(table.block_ids), num_cached)
        assert not set(s.table[num_cached:]) & self.used(), "given to two writers"
        assert all(self.memory.get(s.table[i]) == s.prefix(i) for i in range(num_cached)), "a hit that is not true"
        self.running[table.sid] = s
        self.epochs[table.sid] = table.epoch

    def remap(self, answer: Updated) -> None:
        for sid, epoch, index, old, new in answer.remaps:
            s = self.running.get(sid)
            if s is not None and s.epoch == epoch:
                assert self.memory.get(new) == s.prefix(index), "not an equal block"
                s.table[index] = new
            self.send(Update, dropped=((sid, epoch, old),))

    @invariant()
    def the_store_does_not_contradict_itself(self) -> None:
        self.core.check_invariants()

    def teardown(self) -> None:
        """When all is over and reconciled, nothing is held."""
        if not hasattr(self, "core"):
            return
        self.take_over()
        self.deliver_everything_in_order()
        assert self.ready
        for sid in sorted(self.running):
            self.send(Update, released=((sid, self.running.pop(sid).epoch),))
        self.send(Update, reclaimed=tuple(self.worker_spares))
        self.deliver_everything_in_order()
        assert self.core.pools["w"].manager.num_free == NUM_BLOCKS


TestStoreCoreMachine = StoreCoreMachine.TestCase
TestStoreCoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
