"""Any sequence of calls against a naive picture of the worker's memory.

The picture knows what each block holds: the tokens from the first one on that a sealed block continues, or the sequence
that is writing into it. So it can say whether a hit is true, whether a block that is given out is anybody else's, and
how long the longest match is, without keys, reference counts or an order of eviction. Every call that was accepted is
repeated at random later moments, under its old number, and must change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.cache_store.block_manager import BlockManager
from services.cache_store.holds import Sealed
from shared.block_keys import chain, root_key
from shared.store_calls import InventoryEntry
from shared.wire import pack_ids

SIZE = 2
NUM_BLOCKS = 12
SALT = bytes(32)
Tokens = tuple[int, ...]

sids = st.sampled_from("abcd")
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@dataclass
class Sequence:
    """As the worker has it. Blocks before num_sealed are sealed, the others this sequence writes."""

    epoch: int
    ids: Tokens
    table: list[int]
    num_sealed: int
    retired: dict[int, int] = field(default_factory=dict)  # old block -> index

    def prefix(self, index: int) -> Tokens:
        return self.ids[: (index + 1) * SIZE]


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.manager = BlockManager(NUM_BLOCKS, SIZE, "v")
        self.order = 0
        self.epochs: dict[str, int] = {}
        self.running: dict[str, Sequence] = {}
        self.spares: list[int] = []
        self.sealed: dict[Tokens, int] = {}  # what a prompt that begins so must be given
        self.listed: dict[int, Tokens] = {}  # what the worker would list: until it writes, what was there before
        self.leads: dict[Tokens, str] = {}
        self.past: list[Callable[[], Any]] = []

    # --- the picture -------------------------------------------------------------------------------------------------

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        """Calls the manager under the next number; `past` can do it again under the same."""
        self.order += 1
        order = self.order
        call = lambda: getattr(self.manager, name)(*args, order, **options)  # noqa: E731
        result = call()
        accepted = getattr(result, "status", "ok") == "ok" and result is not False and result != Sealed(False)
        if accepted and name != "reconcile":  # an overtaken reconcile does not reach the manager, see `pool`
            self.past.append(call)
        return result

    def in_use(self) -> list[int]:
        tables = [b for s in self.running.values() for b in [*s.table, *s.retired]]
        return tables + self.spares

    def num_free(self) -> int:
        return NUM_BLOCKS - len(set(self.in_use()))

    def given_out(self, block_ids: list[int] | tuple[int, ...], owners: list[int]) -> None:
        """Blocks that will be written into: nobody may have them, and what they held is lost."""
        assert not set(block_ids) & set(owners) and len(set(block_ids)) == len(block_ids)
        self.sealed = {prefix: b for prefix, b in self.sealed.items() if b not in block_ids}

    def longest_match(self, ids: Tokens, limit: int) -> list[int]:
        matched: list[int] = []
        while len(matched) < limit and ids[: (len(matched) + 1) * SIZE] in self.sealed:
            matched.append(self.sealed[ids[: (len(matched) + 1) * SIZE]])
        return matched

    def end(self, sid: str) -> None:
        self.running.pop(sid, None)
        self.leads = {prefix: leader for prefix, leader in self.leads.items() if leader != sid}

    # --- calls -------------------------------------------------------------------------------------------------------

    @rule(sid=sids, ids=prompts, wait=st.booleans(), cached=st.booleans(), keep_free=st.integers(0, 2))
    def ensure(self, sid: str, ids: Tokens, wait: bool, cached: bool, keep_free: int) -> None:
        epoch = self.epochs[sid] = self.epochs.get(sid, 0) + 1
        self.end(sid)
        limit = (len(ids) - 1) // SIZE if cached else 0
        matched = self.longest_match(ids, limit)
        num_matched, num_blocks = len(matched), len(ids) // SIZE + 1
        leader = self.leads.get(ids[: (num_matched + 1) * SIZE]) if wait and num_matched < limit else None
        num_needed = num_blocks - num_matched + len(set(matched) - set(self.in_use()))
        options = {"wait_for_leader": wait, "use_cached": cached, "keep_free": keep_free}
        result = self.do("ensure", sid, epoch, SALT, pack_ids(ids), **options)
        if leader is not None:
            assert (result.status, result.leader) == ("wait", leader)
            awaited = [ids[: (i + 1) * SIZE] for i in range(num_matched, result.leader_index + 1)]
            assert awaited and all(self.leads[p] == leader for p in awaited) and result.leader_index < limit
        elif num_needed + keep_free > self.num_free():
            assert (result.status, result.num_needed) == ("full", num_needed)
        else:
            assert result.status == "ok" and result.cached_length == num_matched * SIZE <= len(ids) - 1
            assert list(result.block_ids[:num_matched]) == matched and len(result.block_ids) == num_blocks
            self.given_out(result.block_ids[num_matched:], self.in_use() + matched)
            self.running[sid] = Sequence(epoch, ids, list(result.block_ids), num_matched)
            for index in range(num_matched, len(ids) // SIZE):
                self.leads.setdefault(ids[: (index + 1) * SIZE], sid)

    @rule(ids=prompts)
    def match(self, ids: Tokens) -> None:
        expected = len(self.longest_match(ids, (len(ids) - 1) // SIZE)) * SIZE
        assert self.manager.match(SALT, pack_ids(ids)) == expected

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def seal(self, data: st.DataObject, token: int) -> None:
        sid = data.draw(st.sampled_from(sorted(self.running)))
        s, index = self.running[sid], self.running[sid].num_sealed
        if index == len(s.table):
            return
        while len(s.ids) < (index + 1) * SIZE:
            s.ids += (token,)
        block_id, twin = s.table[index], self.sealed.get(s.prefix(index))
        self.listed[block_id] = s.prefix(index)
        part = s.prefix(index)[-SIZE:]
        result = self.do("seal", sid, s.epoch, index, block_id, part)
        s.num_sealed += 1
        self.expect_sealed(s, index, result, twin)

    def expect_sealed(self, s: Sequence, index: int, result: Sealed, twin: int | None) -> None:
        block_id = s.table[index]
        self.sealed.setdefault(s.prefix(index), block_id)
        if twin is None or twin == block_id:
            assert result == Sealed(True)
        else:
            assert result == Sealed(True, twin)
            s.table[index] = twin
            s.retired[block_id] = index

    @rule(sid=sids, epoch=st.integers(0, 3), index=st.integers(-1, 4), block_id=st.integers(-1, NUM_BLOCKS))
    def seal_what_is_not_held_there(self, sid: str, epoch: int, index: int, block_id: int) -> None:
        s = self.running.get(sid)
        if s is None or s.epoch != epoch or not 0 <= index < len(s.table) or s.table[index] != block_id:
            assert not self.manager.seal(sid, epoch, index, block_id, (8, 8), self.order + 1).accepted

    @precondition(lambda self: any(s.retired for s in self.running.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        retired = sorted((sid, b) for sid, s in self.running.items() for b in s.retired)
        sid, block_id = data.draw(st.sampled_from(retired))
        self.do("drop", sid, self.running[sid].epoch, block_id)
        del self.running[sid].retired[block_id]

    @rule(sid=sids, back=st.integers(0, 1))
    def release(self, sid: str, back: int) -> None:
        epoch = self.epochs.get(sid, 0) - back
        if back == 0:
            self.end(sid)
        self.do("release", sid, epoch)

    @rule(num_blocks=st.integers(0, 4))
    def grant(self, num_blocks: int) -> None:
        num_new = min(max(0, num_blocks - len(self.spares)), self.num_free())
        spares = self.do("grant", num_blocks)
        new = spares[len(self.spares) :]
        assert list(spares[: len(self.spares)]) == self.spares and len(new) == num_new
        self.given_out(new, self.in_use())
        self.spares = list(spares)

    @precondition(lambda self: self.spares and self.running)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        sid = data.draw(st.sampled_from(sorted(self.running)))
        block_id = data.draw(st.sampled_from(self.spares))
        s = self.running[sid]
        assert self.do("take", sid, s.epoch, len(s.table), block_id)
        self.spares.remove(block_id)
        s.table.append(block_id)

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3))
    def reclaim(self, block_ids: list[int]) -> None:
        self.do("reclaim", block_ids)
        self.spares = [b for b in self.spares if b not in block_ids]

    # --- the worker's word -------------------------------------------------------------------------------------------

    def report(self, lost: str) -> None:
        """Reconcile with a running set in which one sequence may be missing."""
        self.end(lost)
        rows = [(sid, s.epoch, SALT, tuple(s.table)) for sid, s in self.running.items()]
        self.do("reconcile", rows, tuple(self.spares))
        self.leads.clear()
        for s in self.running.values():
            s.retired.clear()

    @rule(lost=sids)
    def take_over(self, lost: str) -> None:
        self.report(lost)

    @rule(lost=sids, forgotten=st.integers(0, 3))
    def restart(self, lost: str, forgotten: int) -> None:
        """A new store rebuilds from what the worker lists; the seals of what runs are repeated, some never are."""
        self.past.clear()
        self.manager = BlockManager(NUM_BLOCKS, SIZE, "v")
        entries = []
        for block_id, prefix in self.listed.items():
            *parents, key = chain(root_key(SALT, "v"), pack_ids(prefix), SIZE)
            parent = parents[-1] if parents else root_key(SALT, "v")
            ids = pack_ids(prefix[-SIZE:])
            entries.append(InventoryEntry(block_id=block_id, key=key, parent_key=parent, ids=ids))
        assert self.manager.rebuild(entries) == 0
        known: dict[Tokens, int] = {}
        for block_id, prefix in self.listed.items():
            known.setdefault(prefix, block_id)
        self.report(lost)
        held = self.in_use()
        self.sealed = {prefix: b for prefix, b in known.items() if b not in held}
        for sid, s in self.running.items():
            num_repeated = max(0, s.num_sealed - forgotten)
            s.num_sealed = 0
            for index in range(num_repeated):
                twin = self.sealed.get(s.prefix(index))
                result = self.do("seal", sid, s.epoch, index, s.table[index], s.prefix(index)[-SIZE:])
                s.num_sealed += 1
                self.expect_sealed(s, index, result, twin)

    # --- what holds always -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def repeat_a_call_of_the_past(self, data: st.DataObject) -> None:
        before = self.visible()
        data.draw(st.sampled_from(self.past))()
        assert self.visible() == before

    def visible(self) -> Any:
        m = self.manager
        holds = {sid: (h.epoch, tuple(h.block_ids), tuple(h.keys), set(h.retired)) for sid, h in m.holds.items()}
        return holds, tuple(m.spares), m.num_free, {b: m.index.entry(b) for b in range(NUM_BLOCKS)}

    @invariant()
    def the_manager_sees_what_the_worker_has(self) -> None:
        self.manager.check_invariants()
        assert {sid: h.block_ids for sid, h in self.manager.holds.items()} == {
            sid: s.table for sid, s in self.running.items()
        }
        assert list(self.manager.spares) == self.spares
        assert self.manager.num_free == self.num_free()

    @invariant()
    def every_hit_is_true(self) -> None:
        for prefix, block_id in self.sealed.items():
            entry = self.manager.index.entry(block_id)
            assert entry is not None and entry.key == chain(root_key(SALT, "v"), pack_ids(prefix), SIZE)[-1]
        assert len(self.manager.index) == len(self.sealed)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
