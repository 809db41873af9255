"""What a store knows of answers, tenant by tenant, in memory alone and bounded. *Pure.*

Workers send answers that have ended and ask for what has changed. Learning takes time, so answers wait, and the shell
around this has them learnt a piece at a time; while too many wait, others are left out. A tenant that nobody has asked
for or sent answers of for the longest time gives way to others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from services.cache_store.fleet_learner import FleetLearner
from shared.store_calls import FleetCall, FleetChanges
from shared.suffix_table import Place, pack_words, place_of
from shared.wire import unpack_ids

MAX_BYTES = 64 << 20  # of all tenants together
TENANT_BYTES = 1024  # of a tenant beside its tables
MAX_WAITING_TOKENS = 1 << 18
PIECE_TOKENS = 256  # learnt at a time: about two milliseconds
MAX_LINES = 2048  # in a reply: 64 KiB


@dataclass(slots=True)
class _Waiting:
    """An answer, from `at` on still to be learnt."""

    tenant: bytes
    ids: list[int]
    place: Place
    num_before: int
    at: int = 0


class FleetStore:
    """name: tells workers that what they know of another store's versions is of no use here."""

    def __init__(self, name: Callable[[], str]) -> None:
        self.counts: Counter[str] = Counter()  # answers_learnt, answers_left_out, tokens_learnt, bytes_told
        self._name = name
        self._learners: OrderedDict[bytes, FleetLearner] = OrderedDict()  # the longest unused first
        self._waiting: deque[_Waiting] = deque()
        self._num_waiting = 0  # tokens
        self._num_bytes = 0

    @property
    def num_tenants(self) -> int:
        return len(self._learners)

    @property
    def num_entries(self) -> int:
        return sum(learner.num_entries for learner in self._learners.values())

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def handle(self, call: FleetCall) -> list[tuple[str, FleetChanges]]:
        """ProtocolError for answers that are none."""
        for tenant, before, answer in call.answers:
            self._wait(tenant, unpack_ids(before), unpack_ids(answer))
        return [(call.reply_to, c) for t, v in call.asks if (c := self._changes(t, v)) is not None]

    def _wait(self, tenant: bytes, before: list[int], ids: list[int]) -> None:
        if self._num_waiting + len(ids) > MAX_WAITING_TOKENS:
            self.counts["answers_left_out"] += 1
            return
        self._waiting.append(_Waiting(tenant, ids, place_of(before), len(before)))
        self._num_waiting += len(ids)

    def _changes(self, tenant: bytes, version: int) -> FleetChanges | None:
        """None if there is nothing to say."""
        learner = self._learners.get(tenant)
        if learner is None:
            return None
        self._learners.move_to_end(tenant)
        words, reached = learner.changes_since(version, MAX_LINES)
        if reached == version:
            return None
        data = pack_words(words)
        self.counts["bytes_told"] += len(data)
        return FleetChanges(
            store=self._name(), tenant=tenant, version=reached, is_all=reached == learner.version, words=data
        )

    def learn_piece(self) -> bool:
        """Of the answer that has waited longest; False if none waits any more."""
        if not self._waiting:
            return False
        answer = self._waiting[0]
        learner = self._learner(answer.tenant)
        ids = answer.ids[answer.at : answer.at + PIECE_TOKENS]
        before = learner.num_bytes
        answer.place = learner.learn(ids, answer.place, answer.num_before + answer.at)
        answer.at += len(ids)
        self._num_waiting -= len(ids)
        self._num_bytes += learner.num_bytes - before
        self.counts["tokens_learnt"] += len(ids)
        if answer.at == len(answer.ids):
            self._waiting.popleft()
            self.counts["answers_learnt"] += 1
        self._make_room()
        return bool(self._waiting)

    def _learner(self, tenant: bytes) -> FleetLearner:
        learner = self._learners.get(tenant)
        if learner is None:
            learner = self._learners[tenant] = FleetLearner()
            self._num_bytes += TENANT_BYTES + learner.num_bytes
        self._learners.move_to_end(tenant)
        return learner

    def _make_room(self) -> None:
        while self._num_bytes > MAX_BYTES and len(self._learners) > 1:
            _, learner = self._learners.popitem(last=False)
            self._num_bytes -= TENANT_BYTES + learner.num_bytes
