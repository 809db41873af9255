"""Random plan changes, steps and lost places on a running set with the engine that checks its KV pool."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gpu_worker.batch import Chunk, Sequence
from shared import scripted_vocab as vocab
from shared.block_keys import chain, root_key
from shared.scripts import CommitCode
from shared.wire import pack_ids
from shared.worker_protocol import Cancel, Extend, Preempt, Reclaim, Remap
from tests.gpu_worker.builders import BLOCK_SIZE, SALT, admit, apply, make_engine, make_running
from tests.gpu_worker.guesser import Guesser
from tests.gpu_worker.overlapping_engine import OverlappingScripted, OverlappingStep

NUM_BLOCKS = 12
PROMPTS = [b"abcdefghij", b"abcdefghXY", b"abcdZ", b"qqqqqqqqqqqqq"]

sids = st.sampled_from(["a.0", "b.0", "c.0"])
block_lists = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4)


class RunningSetMachine(RuleBasedStateMachine):
    """Whatever a scheduler asks for, also nonsense: no block gets two writers and no token is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.running = make_running(NUM_BLOCKS, max_model_len=40, drafter=Guesser())
        self.engine = OverlappingScripted(make_engine(self.running))
        self.in_flight: list[tuple[list[Chunk], OverlappingStep]] = []
        self.epoch = 0
        self.seen: dict[tuple[str, int], Sequence] = {}

    @rule(sid=sids, prompt=st.sampled_from(PROMPTS), block_ids=block_lists, num_cached=st.integers(0, 3))
    def admit_anything(self, sid: str, prompt: bytes, block_ids: list[int], num_cached: int) -> None:
        self.epoch += 1
        cached_length = num_cached * BLOCK_SIZE
        admit(self.running, prompt, sid=sid, epoch=self.epoch, block_ids=block_ids, cached_length=cached_length)

    @rule(sid=sids, prompt=st.sampled_from(PROMPTS))
    def admit_as_a_store_would(self, sid: str, prompt: bytes) -> None:
        """With what is sealed, and free blocks for the rest."""
        keys = chain(root_key(SALT, self.running.info.variant), pack_ids(list(prompt)), BLOCK_SIZE)
        by_key = {e.key: e.block_id for e in self.running.sealed.entries()}
        cached = []
        for key in keys[: (len(prompt) - 1) // BLOCK_SIZE]:
            if key not in by_key:
                break
            cached.append(by_key[key])
        free = [b for b in range(NUM_BLOCKS) if self.running.blocks.is_free(b) and b not in cached]
        block_ids = (cached + free)[: len(prompt) // BLOCK_SIZE + 1]
        self.epoch += 1
        cached_length = BLOCK_SIZE * len(cached)
        admit(self.running, prompt, sid=sid, epoch=self.epoch, block_ids=block_ids, cached_length=cached_length)

    @rule(sid=st.sampled_from(["a.0", "b.0", "c.0", ""]), block_ids=block_lists)
    def extend(self, sid: str, block_ids: list[int]) -> None:
        apply(self.running, Extend(sid=sid, epoch=self.epoch_of(sid), pool_term=0, block_ids=tuple(block_ids)))

    @rule(block_ids=block_lists)
    def reclaim(self, block_ids: list[int]) -> None:
        apply(self.running, Reclaim(pool_term=0, block_ids=tuple(block_ids)))

    @rule(sid=sids, index=st.integers(0, 2), block_id=st.integers(0, NUM_BLOCKS - 1))
    def remap(self, sid: str, index: int, block_id: int) -> None:
        apply(self.running, Remap(sid=sid, epoch=self.epoch_of(sid), pool_term=0, index=index, block_id=block_id))

    @rule(sid=sids, kind=st.sampled_from([Preempt, Cancel]))
    def stop(self, sid: str, kind: type[Preempt] | type[Cancel]) -> None:
        apply(self.running, kind(sid=sid, epoch=self.epoch_of(sid)))

    def epoch_of(self, sid: str) -> int:
        seq = self.running.sequences.get(sid)
        return seq.epoch if seq is not None else 0

    @rule()
    def begin_step(self) -> None:
        if self.in_flight and not self.in_flight[-1][1].may_be_followed:
            self.end_step()
        chunks = self.running.draft(self.running.prepare(max_prefill_tokens=64))
        if chunks:
            self.in_flight.append((chunks, self.engine.begin(chunks)))
        if len(self.in_flight) > 1:
            self.end_step()

    @rule()
    def end_step(self) -> None:
        if self.in_flight:
            chunks, step = self.in_flight.pop(0)
            self.running.advance(chunks, step.results())  # raises KVCorruption if a block table is wrong

    @rule()
    def fail_step(self) -> None:
        """What is in flight is forgotten, and computed again."""
        for _, step in self.in_flight:
            step.results()
        self.in_flight.clear()
        self.running.recall()

    @rule(codes=st.lists(st.sampled_from([CommitCode.APPENDED, CommitCode.STALE, CommitCode.DONE]), min_size=3))
    def commit(self, codes: list[CommitCode]) -> None:
        commit = self.running.ledger.build()
        answers = [(code, e.first + e.count) for code, e in zip(codes, commit.entries, strict=False)]
        if len(answers) == len(commit.entries):
            for (sid, epoch), reason in self.running.ledger.apply(commit, answers):
                self.running.dropped(sid, epoch, reason)

    @rule()
    def new_life(self) -> None:
        self.running.reset()

    @invariant()
    def every_unsealed_block_has_one_holder(self) -> None:
        writers: dict[int, str] = {}
        for seq in self.running.sequences.values():
            assert len(set(seq.block_ids)) == len(seq.block_ids)
            for index, block_id in enumerate(seq.block_ids):
                assert block_id not in self.running.blocks.spares
                if index >= seq.num_sealed:
                    assert block_id not in writers, (block_id, seq.sid, writers[block_id])
                    writers[block_id] = seq.sid
        for seq in self.running.sequences.values():
            assert not any(writers.get(b) not in (None, seq.sid) for b in seq.block_ids[: seq.num_sealed])
        assert not {e.block_id for e in self.running.sealed.entries()} & set(writers)

    @invariant()
    def holders_are_what_the_tables_say(self) -> None:
        tables: dict[int, set[str]] = {}
        for seq in self.running.sequences.values():
            for block_id in seq.block_ids:
                tables.setdefault(block_id, set()).add(seq.sid)
        assert self.running.blocks._holders == tables

    @invariant()
    def tokens_are_right_and_every_runner_has_an_account(self) -> None:
        for seq in self.running.sequences.values():
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            assert seq.token_ids[seq.num_prompt_tokens :] == vocab.answer(prompt, seq.num_output_tokens)
            assert self.running.ledger.has(seq.sid, seq.epoch)
            self.seen[seq.sid, seq.epoch] = seq

    @invariant()
    def everyone_who_left_is_reported_or_of_an_old_life(self) -> None:
        told = {(e.sid, e.epoch) for e in self.running.outbox.carry(()).ended}
        here = {(s.sid, s.epoch) for s in self.running.sequences.values()}
        if not told and not here:
            self.seen.clear()  # a new life
        assert set(self.seen) <= told | here


TestRunningSetMachine = RunningSetMachine.TestCase
TestRunningSetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
