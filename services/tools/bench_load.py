"""Sends load to an OpenAI-compatible server and records when what came back. Judges nothing.

Prompts are random common words (about one token each) from a seed; a run with a new seed finds nothing in the
server's prefix cache. Each request has a connection of its own, so connecting is part of its time to first token.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.tools.bench_stats import Run, Sample

WORDS = """
amber anchor apple autumn basket beacon birch blanket bottle branch bridge bright candle canyon carpet castle
cedar chalk cherry circle clover cobalt copper coral cotton crystal dawn delta desert dragon eagle ember
falcon feather fern fiddle flint forest fossil garnet ginger glacier granite harbor harvest hazel helmet
hollow honey island ivory jasmine jungle kettle ladder lagoon lantern lemon linen maple marble meadow mirror
nectar oasis olive orchard oyster paper pebble pepper pilot planet plume prairie quartz raven ribbon river
saddle saffron sailor shadow silver spruce summit timber tulip tunnel valley velvet violet walnut willow
winter zephyr
""".split()  # noqa: SIM905 one word a string is 100 lines


@dataclass(frozen=True)
class Load:
    """rate: mean arrivals a second (Poisson), or 0 for a closed loop of `concurrency` clients."""

    url: str
    num_requests: int
    concurrency: int = 1
    rate: float = 0.0
    prompt_words: int = 100
    prompt_tokens: int = 0  # instead of words: that many random ids, from [1000, 20000)
    shared_prefix: float = 0.0
    max_tokens: tuple[int, ...] = (64,)  # cycled over the requests
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False
    model: str = ""
    api_key: str = ""
    timeout_s: float = 300.0


class RequestFailed(Exception):
    """The server answered with an error, or the stream ended early; the text is a short kind."""


Prompt = str | list[int]


def prompts(load: Load) -> list[Prompt]:
    rng = random.Random(load.seed)
    if load.prompt_tokens:
        return [rng.choices(range(1000, 20000), k=load.prompt_tokens) for _ in range(load.num_requests)]
    num_shared = round(load.prompt_words * load.shared_prefix)
    base = rng.choices(WORDS, k=num_shared)
    return [" ".join(base + rng.choices(WORDS, k=load.prompt_words - num_shared)) for _ in range(load.num_requests)]


def _body(load: Load, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": load.model, "max_tokens": max_tokens, "temperature": load.temperature, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    return body | ({"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt})


def _has_text(event: dict[str, Any]) -> bool:
    return any(c.get("text") or (c.get("delta") or {}).get("content") for c in event.get("choices") or [])


async def _events(response: aiohttp.ClientResponse) -> Any:
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(f"error event: {str(event['error'].get('code'))[:80]}")
            yield event
    raise RequestFailed("stream ended early")


async def send(session: aiohttp.ClientSession, load: Load, prompt: Prompt, max_tokens: int, start: float) -> Sample:
    """One streamed request; start: perf_counter() at its (planned) sending."""
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    times: list[float] = []
    usage: dict[str, Any] = {}
    async with session.post(load.url + path, json=_body(load, prompt, max_tokens)) as response:
        if response.status != 200:
            raise RequestFailed(f"HTTP {response.status}")
        async for event in _events(response):
            usage = event.get("usage") or usage
            if _has_text(event):
                times.append(time.perf_counter())
    if not times:
        raise RequestFailed("no text")
    details = usage.get("prompt_tokens_details") or {}
    return Sample(
        ttft=times[0] - start, e2e=time.perf_counter() - start,
        gaps=[b - a for a, b in zip(times, times[1:], strict=False)],
        num_prompt_tokens=usage.get("prompt_tokens", 0), num_output_tokens=usage.get("completion_tokens", len(times)),
        num_cached_tokens=details.get("cached_tokens") or 0,
    )  # fmt: skip


async def run(load: Load) -> Run:
    """The whole load; errors are counted, not raised."""
    result = Run()
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def one(prompt: Prompt, max_tokens: int, start: float) -> None:
            try:
                result.samples.append(await send(session, load, prompt, max_tokens, start))
            except RequestFailed as e:
                result.errors[str(e)] += 1
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
                result.errors[type(e).__name__] += 1

        begin = time.perf_counter()
        work = zip(prompts(load), _cycle(load.max_tokens), strict=False)
        if load.rate:
            await _open_loop(load, work, one)
        else:
            await asyncio.gather(*(_client(work, one) for _ in range(min(load.concurrency, load.num_requests))))
        result.wall_s = time.perf_counter() - begin
    return result


def _cycle(values: tuple[int, ...]) -> Iterator[int]:
    while True:
        yield from values


async def _client(work: Iterator[tuple[Prompt, int]], one: Any) -> None:
    for prompt, max_tokens in work:
        await one(prompt, max_tokens, time.perf_counter())


async def _open_loop(load: Load, work: Iterator[tuple[Prompt, int]], one: Any) -> None:
    rng, at = random.Random(load.seed + 1), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for prompt, max_tokens in work:
            at += rng.expovariate(load.rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.create_task(one(prompt, max_tokens, at))
