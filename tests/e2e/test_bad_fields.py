"""Every field of every route, with every kind of value, beside others whose answers must not change by a byte."""

from __future__ import annotations

import asyncio
import collections
import json

import pytest

from tests.e2e.bad_fields import ONE_OF, Case, cases
from tests.e2e.clients import Answer, Client
from tests.e2e.schema_checks import FURTHER_RULES
from tests.e2e.test_bad_input import check_error, neighbours

NUM_AT_ONCE = 8


async def check(client: Client, case: Case) -> int:
    """The status of the answer, which must be right for the case."""
    async with client.session.post(client.url + case.path, data=case.body) as response:
        status, text = response.status, await response.text()
    if status == 200:
        assert case.allowed, f"{case}: refused by the schema, and taken"
        return status
    body = json.loads(text)
    assert status in (400, 404), f"{case}: {status} {text[:500]}"
    check_error(status, body)
    named = (body["error"]["param"] or "").split(".")[0].split("[")[0]
    if case.readable:
        assert named == case.field or {named, case.field} == set(ONE_OF), f"{case}: {text}"
    else:
        assert named in ("", case.field), f"{case}: {text}"
    if case.allowed:
        assert status == 404 or case.field in FURTHER_RULES[case.path], f"{case}: right by the schema, but {text}"
    return status


@pytest.mark.timeout(110)
async def test_every_field_with_every_kind_of_value(client: Client, undisturbed: list[Answer]) -> None:
    _, document = await client.get("/openapi.json")
    waiting = collections.deque(cases(document))
    assert len(waiting) > 4000
    counts: collections.Counter[int] = collections.Counter()

    wrong: list[str] = []

    async def work() -> None:
        while waiting:
            try:
                counts[await check(client, waiting.popleft())] += 1
            except AssertionError as e:
                wrong.append(str(e)[:1000])

    async with neighbours(client, undisturbed):
        await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    assert not wrong, (len(wrong), wrong[:20])
    assert counts[200] > 300 and counts[400] > 2500, counts
    assert await client.get("/health/ready") == (200, {"status": "ready"})
