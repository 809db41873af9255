"""Nobody works for a client that has gone, in whatever phase, streaming or not, nor for one that stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.gateway import http_server
from services.gateway.open_request import MAX_QUEUED_BYTES
from shared.scripted_vocab import SCRIPT
from shared.scripts import CommitCode
from tests.gateway.conftest import Served
from tests.gateway.raw_client import RawClient
from tests.helpers import wait_until

WITHIN_S = 2.0


async def is_cancelled(served: Served, sid: str) -> bool:
    record = await served.worker.records.sequence(sid)
    return record is not None and record.state == "done" and b"cancelled" in record.outcome


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "half close"])
async def test_request_lifecycle_a_client_that_leaves_frees_everything(
    served: Served, phase: str, streamed: bool, how: str
) -> None:
    client = await RawClient.connect(served)
    client.post("/v1/completions", {"prompt": "x", "max_tokens": 100, "n": 2, "stream": streamed})
    sids = await wait_until(served.worker.queued)
    if phase != "queued":
        for sid in sids:
            await served.worker.place(sid)
    if phase == "decode":
        for sid in sids:
            await served.worker.commit(sid, [ord("a")])
        if streamed:
            await client.reader.readuntil(b"data: ")
    if how == "close":
        client.close()
    else:
        client.writer.write_eof()
    for sid in sids:
        await wait_until(lambda sid=sid: is_cancelled(served, sid), WITHIN_S)
    assert await served.worker.queued() == []
    if phase != "queued":
        assert (await served.worker.commit(sids[0], [ord("b")]))[0] is CommitCode.DONE
    assert served.service.inflight.requests == []
    client.close()
    await client.writer.wait_closed()


async def test_one_clients_leaving_ends_no_other(served: Served) -> None:
    leaving, staying = await RawClient.connect(served), await RawClient.connect(served)
    for client in (leaving, staying):
        client.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True})
    sids = await wait_until(lambda: at_least(2, served.worker.queued))
    leaving.close()
    states = await wait_until(lambda: some_cancelled(served, sids), WITHIN_S)
    [other] = [sid for sid, cancelled in states.items() if not cancelled]
    await served.worker.place(other)
    await served.worker.commit(other, list(b"text"), "length")
    assert b"[DONE]" in await staying.reader.readuntil(b"[DONE]")
    staying.close()


async def at_least(number: int, ask: Callable[[], Awaitable[list[str]]]) -> list[str]:
    found = await ask()
    return found if len(found) >= number else []


async def some_cancelled(served: Served, sids: list[str]) -> dict[str, bool]:
    states = {sid: await is_cancelled(served, sid) for sid in sids}
    return states if any(states.values()) else {}


async def test_request_lifecycle_a_client_that_stops_reading_is_cut_and_slows_nobody(
    serve_with: Callable[..., Awaitable[Served]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve_with(send_timeout_s=0.2)
    monkeypatch.setattr(http_server, "SEND_BUFFER_BYTES", 1 << 14)
    served.worker.member = served.worker.member.model_copy(update={"max_model_len": 10**8, "num_blocks": 10**7})
    await served.worker.join()
    await wait_until(lambda: served.service.fleet.limits(1).max_tokens == 10**8)
    slow, quick = await RawClient.connect(served), await RawClient.connect(served)
    sids = {}
    for client in (slow, quick):
        body = {"prompt": "x", "max_tokens": 10**7, "stream": True, "skip_special_tokens": False}
        client.post("/v1/completions", body)
        [sids[client]] = await wait_until(served.worker.queued)
        await served.worker.place(sids[client])
    num_sent = 0
    while not await is_cancelled(served, sids[slow]):
        token = ord("a") + num_sent % 26
        await served.worker.commit_all({sids[quick]: ([token], ""), sids[slow]: ([SCRIPT] * 4000, "")})
        await asyncio.wait_for(quick.reader.readuntil(f'"text":"{chr(token)}"'.encode()), WITHIN_S)
        num_sent += 1
        request = next((r for r in served.service.inflight.requests if r.rid in sids[slow]), None)
        assert request is None or request.num_bytes <= MAX_QUEUED_BYTES
    assert served.service.guard.num_cut == 1
    assert num_sent > 5  # what the kernel's buffers take does not count as slow
    quick.close()
    slow.close()
