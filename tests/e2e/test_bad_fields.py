"""Every field of every route, over HTTP, beside others whose answers must not change by a byte.

The whole table is tried without HTTP in `tests/gateway/test_every_field.py`; here a part, and all of it if slow.
"""

from __future__ import annotations

import asyncio
import collections
import json

import aiohttp
import pytest

from tests.e2e.clients import Answer, Client
from tests.e2e.test_bad_input import check_error, neighbours
from tests.gateway.bad_fields import Case, cases, check_verdict

NUM_AT_ONCE = 8


async def check(session: aiohttp.ClientSession, url: str, case: Case) -> int:
    """The status of the answer, which must be right for the case."""
    async with session.post(url + case.path, data=case.body) as response:
        status, text = response.status, await response.text()
    error = None
    if status != 200:
        check_error(status, json.loads(text))
        error = json.loads(text)["error"]
    check_verdict(case, status, error)
    return status


async def check_all(client: Client, undisturbed: list[Answer], every: int) -> collections.Counter[int]:
    _, document = await client.get("/openapi.json")
    waiting = collections.deque(list(cases(document))[::every])
    counts: collections.Counter[int] = collections.Counter()
    wrong: list[str] = []

    async def work(session: aiohttp.ClientSession) -> None:
        while waiting:
            try:
                counts[await check(session, client.url, waiting.popleft())] += 1
            except AssertionError as e:
                wrong.append(str(e)[:1000])

    async with neighbours(client, undisturbed), aiohttp.ClientSession() as session:
        await asyncio.gather(*(work(session) for _ in range(NUM_AT_ONCE)))
    assert not wrong, (len(wrong), wrong[:20])
    assert await client.get("/health/ready") == (200, {"status": "ready"})
    return counts


async def test_fields_with_all_kinds_of_values(client: Client, undisturbed: list[Answer]) -> None:
    counts = await check_all(client, undisturbed, every=7)
    assert counts[200] > 50 and counts[400] > 500, counts


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_field_with_every_kind_of_value(client: Client, undisturbed: list[Answer]) -> None:
    counts = await check_all(client, undisturbed, every=1)
    assert counts[200] > 300 and counts[400] > 2500, counts
