"""Calls of Redis: bounded in time, and repeated until they are answered."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError, OutOfMemoryError, ReadOnlyError, ResponseError

from services.gateway.redis_calls import Looks, Owed, in_time
from shared.bus import LOST, CannotWrite


async def test_a_call_without_an_answer_counts_as_lost() -> None:
    with pytest.raises(LOST):
        await in_time(asyncio.Event().wait(), 0.01)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        ReadOnlyError("You can't write against a read only replica."),
        ResponseError("Error running script: @user_script:30: -OOM command not allowed when used memory is."),
        ResponseError("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist"),
    ],
)
async def test_a_server_that_cannot_write_counts_as_lost(error: Exception) -> None:
    async def answer() -> None:
        raise error

    with pytest.raises(CannotWrite):
        await in_time(answer())
    assert issubclass(CannotWrite, LOST)


async def test_another_refusal_is_an_error_of_ours() -> None:
    async def answer() -> None:
        raise ResponseError("WRONGTYPE")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await in_time(answer())


async def test_what_is_owed_is_paid_in_order_and_again_after_a_loss() -> None:
    owed, paid, failing = Owed(), [], [True]

    def call(name: str, fails: bool = False) -> None:
        async def pay() -> None:
            if fails and failing:
                failing.pop()
                raise ConnectionError("lost")
            paid.append(name)

        owed.add(name, pay)

    call("a")
    call("b", fails=True)
    call("c")
    with pytest.raises(ConnectionError):
        await owed.settle()
    assert (paid, len(owed)) == (["a"], 2)
    await asyncio.wait_for(owed.wait(), 1)
    await owed.settle()
    assert (paid, len(owed)) == (["a", "b", "c"], 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(owed.wait(), 0.01)


async def test_what_redis_refuses_to_hear_holds_up_nothing_else() -> None:
    """One record that makes no sense ends neither the gateway nor what others are owed."""
    owed, paid = Owed(), []

    async def refused() -> None:
        raise ResponseError("a script has failed")

    async def pay() -> None:
        paid.append("b")

    owed.add("a", refused)
    owed.add("b", pay)
    await owed.settle()
    assert paid == ["b"] and len(owed) == 0


async def test_what_is_owed_is_bounded_however_long_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.redis_calls.MAX_OWED", 2)
    owed, paid = Owed(), []

    def call(name: str) -> None:
        async def pay() -> None:
            paid.append(name)

        owed.add(name, pay)

    for name in ("a", "b", "b", "c"):
        call(name)
    await owed.settle()
    assert paid == ["b", "c"]


async def test_what_is_owed_anew_while_it_is_being_paid_is_paid_again() -> None:
    owed, paid = Owed(), []

    async def second() -> None:
        paid.append("second")

    async def first() -> None:
        owed.add("a", second)
        paid.append("first")

    owed.add("a", first)
    await owed.settle()
    assert paid == ["first", "second"]


async def test_many_who_look_at_once_are_spaced_out() -> None:
    looks, now = Looks(), asyncio.get_running_loop().time()
    handles = [looks.later(lambda: None, num_reads=2) for _ in range(1000)]
    for handle in handles:
        handle.cancel()
    after_s = [handle.when() - now for handle in handles]
    assert after_s[0] == pytest.approx(0.1, abs=0.05) and after_s[-1] == pytest.approx(0.1 + 999 * 0.01, abs=0.05)
