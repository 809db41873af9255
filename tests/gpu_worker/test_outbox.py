from __future__ import annotations

from services.gpu_worker.outbox import MAX_SEAL_BYTES, SEAL_BYTES, Outbox, cut_seals
from shared.worker_protocol import Seal, Taken


def seal(index: int, sid: str = "r.0", num_ids: int = 16) -> Seal:
    return Seal(sid=sid, epoch=1, index=index, block_id=index, ids=tuple(range(num_ids)))


def test_what_was_carried_stays_until_it_is_acknowledged() -> None:
    outbox = Outbox()
    outbox.took(Taken(sid="r.0", epoch=1, index=2, block_id=9))
    outbox.sealed([seal(0)])
    outbox.ended("r.0", 1, "stop")
    first = outbox.carry(())
    outbox.sealed([seal(1, "q.0")])  # while the commit is under way
    assert outbox.carry(()).taken == first.taken and outbox.carry(()).ended == first.ended
    outbox.acknowledged(first)
    assert outbox and not outbox.urgent
    assert [s.sid for s in outbox.carry(()).seals] == ["q.0"]
    outbox.acknowledged(outbox.carry(()))
    assert not outbox


def test_what_was_taken_is_numbered_as_long_as_the_worker_lives() -> None:
    outbox = Outbox()
    for number in range(3):
        outbox.took(Taken(sid="r.0", epoch=1, index=number, block_id=number))
        assert outbox.carry(()).taken_from == 0, "until it is acknowledged"
    outbox.acknowledged(outbox.carry(()))
    outbox.took(Taken(sid="r.0", epoch=1, index=3, block_id=3))
    assert (outbox.carry(()).taken_from, outbox.num_told) == (3, 3)
    outbox.superseded([])
    assert (outbox.carry(()).taken_from, outbox.num_told) == (4, 4)


def test_an_end_waits_until_its_last_token_is_in_the_log() -> None:
    outbox = Outbox()
    outbox.ended("r.0", 1, "stop")
    outbox.ended("q.0", 1, "stale")
    carried = outbox.carry({("r.0", 1)})
    assert [e.sid for e in carried.ended] == ["q.0"]
    outbox.acknowledged(carried)
    assert outbox.urgent and [e.sid for e in outbox.carry(()).ended] == ["r.0"]


def test_an_end_waits_for_the_seals_of_its_sequence() -> None:
    outbox = Outbox()
    num_fitting = MAX_SEAL_BYTES // (SEAL_BYTES + 64)
    outbox.sealed([seal(i) for i in range(num_fitting + 1)])
    outbox.ended("r.0", 1, "stop")
    outbox.ended("q.0", 1, "stop")
    first = outbox.carry(())
    assert len(first.seals) == num_fitting and [e.sid for e in first.ended] == ["q.0"]
    outbox.acknowledged(first)
    assert outbox.urgent
    second = outbox.carry(())
    assert [s.index for s in second.seals] == [num_fitting] and [e.sid for e in second.ended] == ["r.0"]
    outbox.acknowledged(second)
    assert not outbox


def test_a_change_during_a_commit_is_told_by_the_next() -> None:
    outbox = Outbox()
    outbox.touch()
    carried = outbox.carry(())
    outbox.touch()
    outbox.acknowledged(carried)
    assert outbox.urgent


def test_a_running_state_says_it_all_but_the_ends() -> None:
    outbox = Outbox()
    outbox.took(Taken(sid="r.0", epoch=1, index=2, block_id=9))
    outbox.sealed([seal(0)])
    outbox.ended("q.0", 1, "refused")
    outbox.superseded([seal(7)])
    carried = outbox.carry(())
    assert not carried.taken and [s.index for s in carried.seals] == [7] and len(carried.ended) == 1


def test_one_seal_fits_however_large() -> None:
    assert cut_seals([seal(0, num_ids=100), seal(1)], max_bytes=10) == ([seal(0, num_ids=100)], [seal(1)])
    assert cut_seals([], max_bytes=10) == ([], [])
