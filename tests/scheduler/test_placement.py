"""Which worker takes a sequence, which gives way, in which order they wait, and how much a worker is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.placement import NEIGHBOUR_COST_TOKENS, choose_victim, choose_worker
from services.scheduler.sequence import MAX_AGING_MS, Queued, QueueState, Running, order_key
from services.scheduler.worker_view import MAX_TOKENS, Phase, WorkerView
from shared.store_calls import Ensure
from shared.wire import MAX_MESSAGE_BYTES, encode
from tests.scheduler.hand import BLOCK_SIZE, NUM_BLOCKS, member


def view(worker: str = "w", num_running: int = 0, **fields: int) -> WorkerView:
    view = WorkerView(member(worker, **fields), term=1, phase=Phase.READY, num_free=NUM_BLOCKS)
    view.running = {f"r{i}.0": Running(f"r{i}.0", 1, 10) for i in range(num_running)}
    return view


# --- workers ---------------------------------------------------------------------------------------------------------


def test_a_prefix_is_worth_as_many_neighbours_as_computing_it_costs() -> None:
    busy, idle = view("busy", num_running=2), view("idle")
    worth = 2 * NEIGHBOUR_COST_TOKENS
    assert choose_worker(1000, [busy, idle], {"busy": worth + 1, "idle": 0}).worker == "busy"
    assert choose_worker(1000, [busy, idle], {"busy": worth - 1, "idle": 0}).worker == "idle"
    assert choose_worker(1000, [busy, idle], {"busy": worth, "idle": 0}).worker == "idle"  # equal: the least loaded


def test_who_did_not_answer_holds_nothing() -> None:
    assert choose_worker(100, [view("a"), view("b")], {"b": 1}).worker == "b"
    assert choose_worker(100, [view("b"), view("a")], {}).worker == "a"


def test_on_their_way_counts_as_load() -> None:
    a, b = view("a"), view("b")
    a.placing, b.following = {"x.0", "y.0"}, {"z.0"}
    assert (a.num_sequences, b.num_sequences) == (2, 1) and choose_worker(10, [a, b], {}).worker == "b"


# --- victims ---------------------------------------------------------------------------------------------------------


def running(
    sid: str, priority: int = 0, num_tokens: int = 10, arrival: int = 0, preempting: bool = False, key: str = ""
) -> Running:
    return Running(sid, 1, num_tokens, priority, arrival, preempting=preempting, key=key)


@pytest.mark.parametrize(
    "candidates, victim",
    [
        ([running("a", priority=1), running("b", priority=2, num_tokens=99)], "b"),
        ([running("a", num_tokens=9), running("b", num_tokens=8)], "b"),
        ([running("a", arrival=5), running("b", arrival=6)], "b"),
        ([running("a", preempting=True), running("b", priority=-9)], "b"),
        ([running("a", preempting=True)], None),
        ([], None),
    ],
)
def test_who_gives_way(candidates: list[Running], victim: str | None) -> None:
    chosen = choose_victim(candidates)
    assert (chosen and chosen.sid) == victim


def newcomer(priority: int, key: str = "") -> Queued:
    return Queued("new.0", 0, 4, priority=priority, key=key)


def test_only_a_lower_priority_gives_way_to_a_newcomer() -> None:
    some = [running("a", priority=1), running("b", priority=2)]
    assert choose_victim(some, newcomer(2)) is None
    assert choose_victim(some, newcomer(1)) is some[1]


def test_what_a_key_says_of_itself_below_the_bound_takes_nothing_from_others() -> None:
    others = [running("a", key="x"), running("b", priority=1, key="x")]
    assert choose_victim(others[:1], newcomer(-9, "y")) is None
    assert choose_victim(others, newcomer(-9, "y")) is others[1], "who says of itself that it can wait"
    assert choose_victim(others, newcomer(-9, "y"), min_priority=-1) is others[1]
    assert choose_victim(others[:1], newcomer(-9, "y"), min_priority=-1) is others[0]
    assert choose_victim(others[:1], newcomer(-9, "x")) is others[0], "its own"


def test_it_cannot_make_others_the_victims_either() -> None:
    urgent = [running("a", priority=-9, num_tokens=5, key="x"), running("c", priority=-1, num_tokens=50, key="x")]
    assert choose_victim([*urgent, running("b", num_tokens=9, key="y")]) is urgent[1]
    smaller = running("b", num_tokens=4, key="y")
    assert choose_victim([*urgent, smaller]) is smaller


# --- the order -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_nobody_stands_back_for_long(long: int, short: int, arrival: int) -> None:
    """Whoever comes the aging time later never passes, however short it is."""
    first, later = Queued("a.0", 0, long, arrival_ms=arrival), Queued("b.0", 0, short)
    later.arrival_ms = arrival + int(MAX_AGING_MS) + 1
    assert order_key(first) < order_key(later)


def test_output_counts_as_well() -> None:
    fresh, resumed = Queued("b.0", 0, 10), Queued("a.0", 1, 10, num_output_tokens=100)
    assert order_key(fresh) < order_key(resumed) and resumed.num_tokens == 110


def test_the_order_is_total() -> None:
    a, b = Queued("a.0", 0, 10), Queued("b.0", 0, 10)
    assert order_key(a) != order_key(b)


def test_who_waits_again_has_no_worker() -> None:
    queued = Queued("a.0", 0, 10, state=QueueState.FOLLOWING, worker="w", leader="l.0", matches={"w": 1})
    queued.back_to_waiting()
    assert (queued.state, queued.worker, queued.leader, queued.matches) == (QueueState.WAITING, "", "", {})


# --- room ------------------------------------------------------------------------------------------------------------


def test_one_sequence_more_than_the_batch_takes() -> None:
    assert [view(num_running=n, max_num_seqs=4).num_slots() for n in (0, 4, 5, 6)] == [5, 1, 0, 0]
    assert view(num_running=0, max_num_seqs=64).num_slots() == 68


@pytest.mark.parametrize("field, value", [("phase", Phase.RECONCILING), ("handing_over", True), ("full_at", 0)])
def test_no_room(field: str, value: object) -> None:
    worker = view()
    assert worker.has_room()
    setattr(worker, field, value)
    assert not worker.has_room()


def test_a_refusal_ends_when_more_is_free() -> None:
    worker = view()
    worker.full_at = 5
    worker.set_free(5)
    assert not worker.has_room()
    worker.set_free(6)
    assert worker.has_room()


def test_what_fits_alone() -> None:
    worker = view()
    assert worker.fits(NUM_BLOCKS * BLOCK_SIZE) and not worker.fits(NUM_BLOCKS * BLOCK_SIZE + 1)
    assert worker.num_blocks_for(NUM_BLOCKS * BLOCK_SIZE) == NUM_BLOCKS


def test_the_ids_of_what_fits_fit_into_a_message() -> None:
    call = Ensure(
        call=1 << 40, reply_to="inbox:" + "s" * 40, worker="w" * 40, run_term=1 << 40, pool_term=1 << 40,
        sid="r" * 40, epoch=1 << 40, salt=bytes(32), ids=bytes(4 * MAX_TOKENS),
    )  # fmt: skip
    assert len(encode(call)) <= MAX_MESSAGE_BYTES
    assert not view(max_model_len=1 << 30, num_blocks=1 << 30).fits(MAX_TOKENS + 1)


# --- spare grants ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_running, speed, num_blocks, target",
    [(0, 100.0, 1000, 0), (1, 0.0, 1000, 2), (2, 40.0, 1000, 20), (2, 4000.0, 1000, 50), (8, 0.0, 100, 8)],
)
def test_how_large_the_grant_should_be(num_running: int, speed: float, num_blocks: int, target: int) -> None:
    worker = view(num_running=num_running, num_blocks=num_blocks)
    worker.tokens_per_second = speed
    assert worker.spare_target() == target


def test_a_grant_is_asked_for_in_time_and_not_for_every_block() -> None:
    worker = view(num_running=2, num_blocks=1000)
    worker.tokens_per_second = 40.0
    wanted = []
    for num_spares in range(21):
        worker.spares = set(range(num_spares))
        if worker.wants_grant():
            wanted.append(num_spares)
    assert wanted == list(range(16))
    worker.spares = set()
    worker.num_free = 0
    assert not worker.wants_grant()
