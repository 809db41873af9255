"""A client that leaves, in whatever phase its request is, leaves nothing behind: its blocks are free within 2 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.clients import Client, Connect
from tests.e2e.load import plain, words
from tests.e2e.stack import Stack
from tests.e2e.state import Sequence
from tests.figures import note
from tests.helpers import wait_until

FREE_WITHIN_S = 2.0
MAX_NUM_SEQS = 4
NUM_BLOCKS = 256
MAX_SPARES = NUM_BLOCKS // 20 + 1  # of the worker's spare grant, which it may keep
LONG = 1000  # tokens of a prompt: a second of computing
ENDLESS = 1500  # tokens of an answer: half a minute
HOLDING = 150  # tokens of an answer that has to be there until others have been queued: three seconds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Slow enough that a request can be caught in any phase, and small enough that some have to wait."""
    env = {
        "scripted_step_ms": 20, "scripted_token_ms": 1, "scripted_num_blocks": NUM_BLOCKS,
        "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 256, "max_model_len": 3000,
    }  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("disconnects")
    async with Stack(stacks_redis, folder, env=env) as stack:
        yield stack


def sequences_of(stack: Stack, known: set[str]) -> list[Sequence]:
    return [s for s in stack.state.sequences() if s.sid not in known]


async def check_nothing_is_left(stack: Stack, left_at: float, num_sequences: int, known: set[str]) -> None:
    worker = stack.process("worker").incarnation

    def settled() -> bool:
        own = sequences_of(stack, known)
        free = stack.state.num_free(worker)
        return all(s.state == "done" for s in own) and free >= NUM_BLOCKS - MAX_SPARES

    await wait_until(settled)
    settled_s = time.perf_counter() - left_at
    note(blocks_free_s=settled_s)
    assert settled_s < FREE_WITHIN_S
    own = sequences_of(stack, known)
    assert len(own) == num_sequences
    assert {s.outcome.reason for s in own if s.outcome} == {"cancelled"}
    assert not stack.state.num_queued()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_request_lifecycle_it_leaves_while_its_request_runs(
    phase: str, stream: bool, stack: Stack, connect: Connect
) -> None:
    client = connect(stack.url)
    known = {s.sid for s in stack.state.sequences()}
    prompt = f"{phase} {stream} " + "x" * (LONG if phase == "prefill" else 40)
    leaving = [client.begin(plain(prompt + str(i), ENDLESS, stream=stream, n=2, temperature=1, seed=1)) for i in (0, 1)]

    def caught() -> bool:
        own = [s for s in sequences_of(stack, known) if s.state == "placed"]
        return bool(own) and all(bool(s.num_tokens) == (phase == "decode") for s in own)

    await wait_until(caught, every=0.002)
    if phase == "decode":
        await wait_until(lambda: len(sequences_of(stack, known)) == 4 and caught())
    neighbour = client.begin(plain(f"neighbour of {phase} {stream}", 20))
    for task in leaving:
        task.cancel()
    left_at = time.perf_counter()
    answer = await neighbour
    answer.check()
    assert answer.text == words(f"neighbour of {phase} {stream}", 20)
    await check_nothing_is_left(stack, left_at, 4, known | {f"{answer.rid}.0"})


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_request_lifecycle_it_leaves_while_its_request_waits(
    stream: bool, stack: Stack, connect: Connect
) -> None:
    """Others have all the slots. They go on; the slots that the one that left waited for are not taken for it."""
    client = connect(stack.url)
    name = f"holds a slot {stream}"
    holders = [client.begin(plain(f"{name} {i}", HOLDING)) for i in range(MAX_NUM_SEQS + 1)]  # one waits at the worker
    await wait_until(lambda: len(stack.state.running()) == MAX_NUM_SEQS + 1)
    known = {s.sid for s in stack.state.sequences()}
    leaving = client.begin(plain(f"queued {stream}", ENDLESS, stream=stream, n=3, temperature=1, seed=3))
    await wait_until(lambda: len(sequences_of(stack, known)) == 3 and stack.state.num_queued() == 3)
    leaving.cancel()
    left_at = time.perf_counter()
    await wait_until(lambda: not stack.state.num_queued())
    assert time.perf_counter() - left_at < FREE_WITHIN_S
    own = sequences_of(stack, known)
    assert len(own) == 3 and {s.outcome.reason for s in own if s.outcome} == {"cancelled"}
    assert all(s.epoch == 0 and not s.num_tokens for s in own), "it was run"
    for i, holder in enumerate(holders):
        assert (await holder).text == words(f"{name} {i}", HOLDING)


async def num_left(client: Client) -> float:
    """Clients that left before an answer, as the gateway counts them."""
    async with client.session.get(f"{client.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = [line for line in lines if line.startswith("headrace_http_requests_total") and 'status="499"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


async def test_it_leaves_before_it_has_sent_its_body(stack: Stack, connect: Connect) -> None:
    client = connect(stack.url)
    known, num_before = {s.sid for s in stack.state.sequences()}, await num_left(client)
    port = stack.process("gateway").port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"prompt": ')
    await writer.drain()
    writer.transport.abort()

    async def noticed() -> bool:
        return await num_left(client) > num_before

    await wait_until(noticed)
    assert sequences_of(stack, known) == []


async def test_many_that_leave_at_any_time_leave_nothing(stack: Stack, connect: Connect) -> None:
    """Ten clients that leave after 0 to 0.3 s, three times; a last one is answered as ever."""
    client = connect(stack.url)
    known = {s.sid for s in stack.state.sequences()}
    for turn in range(3):
        tasks = [
            client.begin(plain(f"leaves {turn} {i} " * 10, ENDLESS, n=1 + i % 3, temperature=1, seed=i))
            for i in range(10)
        ]
        for i, task in enumerate(tasks):
            asyncio.get_running_loop().call_later(0.03 * i, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
    left_at = time.perf_counter()
    await wait_until(lambda: all(s.state == "done" for s in sequences_of(stack, known)))
    assert time.perf_counter() - left_at < FREE_WITHIN_S
    answer = await client.ask(plain("the last one", 20))
    answer.check()
    assert answer.text == words("the last one", 20)
