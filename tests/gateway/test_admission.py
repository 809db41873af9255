"""How long a refused client is told to wait."""

from __future__ import annotations

import pytest

from services.gateway.admission import MAX_RETRY_AFTER_S, DrainMeter, refused
from shared.scripts import Admission


def meter(*readings: tuple[float, int]) -> DrainMeter:
    drained = DrainMeter()
    for now, num_left in readings:
        drained.read(num_left, now)
    return drained


@pytest.mark.parametrize(
    ("readings", "seconds"),
    [
        ([], 1),
        ([(0, 5)], 1),
        ([(0, 5), (1, 5)], 1),
        ([(0, 0), (10, 100)], 5),
        ([(0, 0), (10, 10)], 50),
        ([(0, 0), (10, 5)], MAX_RETRY_AFTER_S),
        ([(0, 0), (30, 0)], MAX_RETRY_AFTER_S),
        ([(0, 0), (100, 100), (101, 100), (102, 300), (110, 300)], 3),
        ([(0, 1000), (10, 0), (20, 100)], 5),
    ],
    ids=["nothing known", "one look", "no time", "10/s", "1/s", "0.5/s", "stuck", "only lately counts", "redis lost"],
)
def test_half_of_the_queue_must_have_drained(readings: list[tuple[float, int]], seconds: int) -> None:
    assert meter(*readings).retry_after_s(100) == seconds


@pytest.mark.parametrize(
    ("admission", "code", "seconds"),
    [
        (Admission("key_open", 4), "concurrency_limit_exceeded", 1),
        (Admission("key_requests", 60, wait_ms=2001), "rate_limit_exceeded", 3),
        (Admission("key_tokens", 60, wait_ms=1), "rate_limit_exceeded", 1),
        (Admission("full_requests", 20), "queue_full", 1),
        (Admission("full_tokens", 2000), "queue_full", 10),
    ],
    ids=lambda value: value.status if isinstance(value, Admission) else "",
)
def test_every_refusal_says_why_and_when_to_come_back(admission: Admission, code: str, seconds: int) -> None:
    error = refused(admission, 10, meter((0, 0), (10, 100)))
    assert (error.status, error.code, error.retry_after_s) == (429, code, seconds)
    assert str(admission.number) in error.message
