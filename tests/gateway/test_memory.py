"""What a request may take of a gateway's memory at its bounds, and beyond them."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.byte_tokenizer import byte_tokenizer
from services.gateway.choice_stream import ChoiceStream
from services.gateway.responses import ChoiceResult, ResponseBuilder, usage
from shared.protocol import SamplingParams, TextParams, TokenChunk
from tests.gateway.conftest import Served

pytestmark = pytest.mark.timeout(240)  # tens of megabytes of JSON, on however busy a machine

MIB = 1 << 20
PIECE = 1 << 16
BODIES: dict[str, Any] = {
    "token ids": {"prompt": [1] * 2_500_000},
    "strings": {"stop": ["ab"] * 1_400_000, "prompt": "x"},
    "numbers": {"stop_token_ids": [1000] * 1_300_000, "prompt": "x"},
    "lists": {"prompt": [[]] * 2_000_000},
    "objects": {"prompt": [{}] * 2_000_000},
    "fields": {f"{i}": i for i in range(400_000)} | {"prompt": 7},
    "messages": {"messages": [{"role": "user", "content": "x"}] * 60_000},
    "one letter": {"prompt": "a" * 200_000},
    "the largest text": {"prompt": "a" * (8 * MIB - 100)},
    "the largest text in escapes": {"prompt": "\u0101" * (8 * MIB // 6 - 100)},
    "100,000 stop strings": {"prompt": "x", "stop": ["x"] * 100_000},
}


class Peak:
    """The most memory that this process has had since `reset`, in MiB."""

    def reset(self) -> int:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        return self.mib()

    def mib(self) -> int:
        [line] = [li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith("VmHWM")]
        return int(line.split()[1]) // 1024


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]


@pytest.mark.parametrize("name", BODIES)
async def test_the_largest_bodies(served: Served, name: str) -> None:
    """16 times its size at most and 50 MiB (lists and objects, of which there may be 65,536), while it is read."""
    body = BODIES[name]
    data, peak = json.dumps(body, separators=(",", ":")).encode(), Peak()
    assert len(data) <= 8 * MIB
    before = peak.reset()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with served.session.post(served.url + path, data=pieces(data)) as response:
        assert response.status == 400
    assert peak.mib() - before <= 16 * len(data) / MIB + 50
    assert served.service.bodies.num_bytes == 0


@pytest.mark.parametrize("size", ["a gigabyte in chunks", "50 MB in one string", "a million messages"])
async def test_bodies_beyond_the_bound(served: Served, size: str) -> None:
    message = b'{"role":"user","content":"x"},'
    piece, number = {
        "a gigabyte in chunks": (b"x" * PIECE, 1 << 14),
        "50 MB in one string": (b"x" * PIECE, 800),
        "a million messages": (message * 2000, 500),
    }[size]

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"messages": [' if "messages" in size else b'{"prompt": "'
        for _ in range(number):
            yield piece

    peak = Peak()
    before = peak.reset()
    try:
        async with served.session.post(served.url + "/v1/completions", data=parts()) as response:
            assert response.status == 413
    except aiohttp.ClientError:
        pass  # cut while it still sends
    assert peak.mib() - before < 40
    assert served.service.bodies.num_bytes == 0


async def test_bodies_that_come_together(served: Served) -> None:
    """Two are read at a time, and what waits is its text alone (here as its client has it too)."""
    data, peak = json.dumps({"prompt": [1] * 600_000}).encode(), Peak()
    before = peak.reset()

    async def one() -> int:
        async with served.session.post(served.url + "/v1/completions", data=pieces(data)) as response:
            return response.status

    statuses = await asyncio.gather(*(one() for _ in range(8)))
    assert set(statuses) <= {400, 503}
    assert peak.mib() - before < 8 * 2 * len(data) / MIB + 2 * 16 * len(data) / MIB + 50


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_answers_with_the_most_log_probabilities(api: Any) -> None:
    """An answer that is not streamed takes three times its text until it is sent."""
    num_choices, num_tokens, tokenizer = 16, 60, byte_tokenizer()
    text, sampling = TextParams(api=api), SamplingParams(max_tokens=num_tokens, seed=0, logprobs=20)
    builder = ResponseBuilder(api, tokenizer, id="x", model="m", created=0, with_logprobs=True)
    top = tuple((i, -1.5 - i / 7) for i in range(20))

    def answer() -> bytes:
        results = []
        for _ in range(num_choices):
            stream, result = ChoiceStream(text, sampling, tokenizer), ChoiceResult(builder)
            for i in range(num_tokens):
                result.add(stream.feed(TokenChunk(first=i, ids=(65 + i % 26,), logprobs=((-1.5, top),))))
            results.append(result)
        return builder.whole(results, usage(1, 1, 0))

    answer()  # fills the tokenizer's tables
    tracemalloc.start()
    size = len(answer())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * size + MIB, (most / size, size)
