"""A worker's link to stores, on a real Redis and real stores; and what one worker gains from another's answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.cache_store.service import StoreService
from services.gpu_worker.admission import Admission
from services.gpu_worker.batch import Sequence
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.fleet_link import FleetLink, store_of
from services.gpu_worker.metrics_defs import WorkerMetrics
from services.gpu_worker.plan_reader import read_change
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.scripted_engine import ScriptedEngine, validate
from services.gpu_worker.speculative.fleet import METHOD, Fleet
from services.gpu_worker.speculative.speculator import Speculator
from shared import scripted_vocab as vocab
from shared.bus import Entry, connect
from shared.leases import Membership
from shared.protocol import Member
from shared.records import Records
from shared.scripts import Scripts
from shared.speculative_config import SpeculativeConfig
from shared.store_calls import FleetChanges
from shared.suffix_table import pack_words, place_of
from shared.wire import encode
from shared.worker_protocol import Admit
from tests.gpu_worker.builders import CAPACITY, make_params
from tests.gpu_worker.speculative.test_speculator import Simulation, known_cost, rows_are_nearly_free
from tests.gpu_worker.worker_bench import Clock, worker_bench
from tests.suffix_words import word_of

VOCAB_SIZE = 50_000
ENGINE = ScriptedEngine(num_blocks=8)
SALT, OTHER = b"a" * 32, b"b" * 32


class Worker:
    """What of a worker has to do with the fleet; its answers are known."""

    def __init__(self, redis: Any, name: str) -> None:
        self.name = name
        self.redis = redis
        self.scripts = Scripts(redis, "m")
        self.records = Records(redis, self.scripts.prefix)
        self.clock = Clock()
        self.fleet = Fleet(VOCAB_SIZE)
        self.link = FleetLink(self.fleet, self.scripts, self.records, clock=self.clock)
        self.speculator = Speculator(
            SpeculativeConfig(method="suffix"), known_cost(rows_are_nearly_free), fleet=self.fleet
        )
        self.simulation = Simulation(self.speculator, rows_are_nearly_free)
        self._last = "0-0"
        self._number = 0

    async def join(self) -> None:
        member = Member(kind="worker", incarnation=self.name)
        await Membership(self.scripts, member, [f"plan:{self.name}"]).join()

    async def turn(self) -> None:
        self.clock.now += 10
        await self.link.turn(lambda: self.name, lambda: False)

    async def hear(self) -> int:
        """What has come by the plan of stores' answers; how many."""
        entries = await self.redis.xrange(self.scripts.key(f"plan:{self.name}"), min=f"({self._last}")
        heard = 0
        for id, fields in entries:
            self._last = id.decode()
            change = await read_change(Entry("plan", self._last, fields), self.name, self.scripts, self.records)
            if isinstance(change, FleetChanges):
                self.link.notice(change)
                heard += 1
        if heard:
            await self.link.take_in()
        return heard

    async def admit(self, salt: bytes = SALT, **params: Any) -> None:
        admission = Admission(make_params(**params), [1], salt, [], None)
        self.link.notice(
            Change("run", 1, Admit(sid="r.0", epoch=1, pool_term=0, cached_length=0, block_ids=()), admission)
        )

    async def answer(self, prompt: list[int], answer: list[int], salt: bytes = SALT, **params: Any) -> int:
        """How many steps that takes."""
        await self.admit(salt, **params)
        self._number += 1
        seq = Sequence(
            sid=f"r{self._number}.0", epoch=1, choice=0, params=make_params(max_tokens=10_000, **params),
            num_prompt_tokens=len(prompt), token_ids=list(prompt), block_ids=[], num_computed=len(prompt) - 1,
            salt=salt, finish="stop",
        )  # fmt: skip
        before = self.simulation.num_steps
        self.simulation.run([seq], [answer])
        return self.simulation.num_steps - before

    @property
    def num_accepted(self) -> int:
        return self.speculator.counts[METHOD].accepted.total()


async def learn(store: StoreService) -> None:
    await store.read(0)
    while store.fleet.has_waiting:
        await store.learn()


class Form:
    """Answers of one kind: the same words around values of their own."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._words = [[self._rng.randrange(VOCAB_SIZE) for _ in range(9)] for _ in range(8)]

    def fill(self) -> tuple[list[int], list[int]]:
        answer = []
        for part in self._words:
            answer += [*part, *(self._rng.randrange(VOCAB_SIZE) for _ in range(2))]
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(20)], answer


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def store(redis: Any) -> StoreService:
    service = StoreService(redis, "m", incarnation="c-1")
    await service.start()
    return service


@pytest.fixture
async def a(redis: Any) -> Worker:
    worker = Worker(redis, "w-a")
    await worker.join()
    return worker


@pytest.fixture
async def b(redis: Any) -> Worker:
    worker = Worker(redis, "w-b")
    await worker.join()
    return worker


async def teach(worker: Worker, store: StoreService, form: Form, count: int = 8, salt: bytes = SALT) -> None:
    for _ in range(count):
        await worker.answer(*form.fill(), salt=salt)
    await worker.turn()
    await learn(store)


async def test_a_worker_gains_from_what_another_has_answered(store: StoreService, a: Worker, b: Worker) -> None:
    form = Form(1)
    cold = await b.answer(*form.fill())
    await teach(a, store, form)
    await b.turn()
    await store.read(0)
    assert await b.hear() == 1
    warm = [await b.answer(*form.fill()) for _ in range(4)]
    assert cold == 88 and max(warm) < cold / 1.3 and min(warm) < cold / 2
    assert b.num_accepted > 150


async def test_another_tenant_gains_nothing(store: StoreService, a: Worker, b: Worker) -> None:
    """Not a step, and is told nothing either."""
    form = Form(2)
    cold = await b.answer(*form.fill(), salt=OTHER)
    await teach(a, store, form)
    await b.turn()
    await store.read(0)
    assert await b.hear() == 0
    assert [await b.answer(*form.fill(), salt=OTHER) for _ in range(4)] == 4 * [cold] and b.num_accepted == 0


@pytest.mark.parametrize("alone", [{"fleet": False}, {"num_speculative_tokens": 0}])
async def test_who_asks_for_isolation_tells_nothing_and_gains_nothing(
    store: StoreService, a: Worker, b: Worker, alone: dict[str, Any]
) -> None:
    form = Form(3)
    for _ in range(8):
        await a.answer(*form.fill(), **alone)
    assert a.fleet.num_ended == 0 and not a.link._due.is_set()
    await teach(a, store, form)
    await b.admit()
    await b.turn()
    await store.read(0)
    assert await b.hear() == 1
    cold = await b.answer(*form.fill(), **alone)
    assert cold == 88 and b.num_accepted == 0
    assert await b.answer(*form.fill()) < cold / 1.3


async def test_what_is_new_comes_with_the_next_request(store: StoreService, a: Worker, b: Worker) -> None:
    first, second = Form(4), Form(5)
    heard = []
    for form in (first, second):
        await teach(a, store, form)
        await b.admit()
        await b.turn()
        await store.read(0)
        heard.append(await b.hear())
        assert await b.answer(*form.fill()) < 60
        await b.turn()
        await learn(store)
        await b.hear()
    assert heard == [1, 1]


async def test_a_store_that_begins_anew_learns_anew_and_what_workers_know_stays(
    store: StoreService, redis: Any, a: Worker, b: Worker
) -> None:
    form = Form(6)
    await teach(a, store, form)
    await b.admit()
    await b.turn()
    await store.read(0)
    await b.hear()
    await store.scripts.gone("store", "c-1")
    other = StoreService(redis, "m", incarnation="c-2")
    await other.start()
    assert await b.answer(*form.fill()) < 60
    await teach(a, other, form)
    c = Worker(redis, "w-c")
    await c.join()
    await c.admit()
    await c.turn()
    await b.turn()
    await other.read(0)
    assert await c.hear() == 1 and await b.hear() == 1
    assert await c.answer(*form.fill()) < 60 and b.link._versions[b.fleet.tenant_of(SALT)][0] == "c-2"


async def test_without_a_store_nothing_is_said_and_nothing_fails(a: Worker) -> None:
    await a.answer(*Form(7).fill())
    await a.turn()
    assert a.fleet.num_waiting == 0


async def test_a_new_tenant_is_asked_about_at_once_and_then_once_in_a_while(store: StoreService, a: Worker) -> None:
    await a.admit()
    await a.link.turn(lambda: a.name, lambda: False)
    assert await num_calls(a) == 1
    await a.admit()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(a.link.turn(lambda: a.name, lambda: False), 0.05)
    assert await num_calls(a) == 1
    await a.admit(OTHER)
    await a.link.turn(lambda: a.name, lambda: False)
    assert await num_calls(a) == 2


async def num_calls(worker: Worker) -> int:
    return int(await worker.redis.xlen(worker.scripts.key("cache:c-1"))) - 1


async def test_a_worker_that_has_nothing_to_do_says_nothing(store: StoreService, a: Worker) -> None:
    await a.admit()
    await a.turn()
    await a.turn()
    assert not a.link._due.is_set() and await num_calls(a) == 1


async def test_tenants_are_shared_among_stores(store: StoreService, redis: Any, a: Worker) -> None:
    other = StoreService(redis, "m", incarnation="c-2")
    await other.start()
    salts = [bytes([n]) * 32 for n in range(12)]
    for salt in salts:
        await a.answer(*Form(8).fill(), salt=salt)
    while a.fleet.num_waiting or a.link._wanted:
        await a.turn()
    for service in (store, other):
        await learn(service)
    nums = [service.fleet.num_tenants for service in (store, other)]
    assert sum(nums) == 12 and min(nums) > 1


def test_few_tenants_move_when_a_store_comes() -> None:
    tenants = [bytes([n]) for n in range(200)]
    moved = [t for t in tenants if store_of(t, ["a", "b"]) != store_of(t, ["a", "b", "c"])]
    assert 40 < len(moved) < 95 and all(store_of(t, ["a", "b", "c"]) == "c" for t in moved)


async def test_a_large_table_is_fetched_part_by_part(
    store: StoreService, a: Worker, b: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cache_store.fleet_store.MAX_LINES", 30)
    await teach(a, store, Form(9))
    await b.admit()
    parts = 0
    while b.link._due.is_set():
        await b.turn()
        await store.read(0)
        parts += await b.hear()
    assert parts > 2 and await b.answer(*Form(9).fill()) < 60


async def test_metrics_say_what_is_held_and_what_became_of_answers(store: StoreService, a: Worker) -> None:
    loop = EngineLoop(ENGINE, RunningSet(ENGINE.info, CAPACITY, validate, a.speculator))
    await teach(a, store, Form(10))
    await a.admit()
    await a.turn()
    await store.read(0)
    await a.hear()
    metrics = WorkerMetrics()
    metrics.observe(loop)
    store.metrics.observe(store.core, store.fleet)
    (table,) = a.fleet.tables
    value = metrics.registry.get_sample_value
    assert value("headrace_worker_fleet_entries") == table.num_entries > 100
    assert value("headrace_worker_fleet_bytes") == table.num_bytes
    assert value("headrace_worker_fleet_tenants") == 1
    assert value("headrace_fleet_answers_total", {"state": "told"}) == 8
    assert value("headrace_fleet_answers_total", {"state": "left_out"}) == 0
    value = store.metrics.registry.get_sample_value
    assert value("headrace_fleet_tenants") == 1
    assert value("headrace_fleet_entries") == store.fleet.num_entries >= table.num_entries
    assert value("headrace_fleet_bytes") == store.fleet.num_bytes > table.num_bytes
    assert value("headrace_fleet_total", {"count": "answers_learnt"}) == 8


async def test_a_worker_hears_of_it_by_its_plan_and_runs_on(redis_url: str, store: StoreService) -> None:
    """A store's answer stands between two sequences."""
    fleet = Fleet(vocab.VOCAB_SIZE)
    words = pack_words(array("Q", [word_of([1, 2], 3, 9)]))
    changes = FleetChanges(store="c-1", tenant=fleet.tenant_of(bytes(32)), version=3, is_all=True, words=words)
    async with worker_bench(redis_url) as bench:
        bench.worker.fleet = FleetLink(fleet, bench.scripts, bench.records)
        await bench.place(b"abcdef", max_tokens=2)
        await bench.scripts.send(f"plan:{bench.worker.incarnation}", encode(changes))
        await bench.place(b"abcdef", rid="q", block_ids=(4, 5, 6), max_tokens=2)
        await bench.run_dry()
        assert [(await bench.record(sid)).state for sid in ("r.0", "q.0")] == ["done", "done"]
        await bench.worker.fleet.take_in()
        assert fleet.tables[0].best(place_of([1, 2]))[0] == 3
