"""`headrace bench --compare`: the same load on several servers in turns, and how the first compares with each other.

A machine's mood changes within minutes, so servers are asked one after the other in every round, each round beginning
with another one, and ratios are taken round by round: the first server's figure over the other's. Prompts are the same
for all servers in a round and new in the next. Some servers keep a core busy after their last answer (vLLM for a second
on CPUs), so the next turn waits until they have come to rest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from services.tools import bench_load, bench_stats
from services.tools.bench_load import Load
from services.tools.bench_stats import Run

CONNECT_TIMEOUT_S = 10.0
MODELS_TIMEOUT_S = 30.0
REST_S = 2.0


class NoServer(Exception):
    """A server does not answer as one should; one sentence."""


@dataclass
class Server:
    """rounds: a summary for each round, None for one that failed; errors says why, one sentence each."""

    url: str
    model: str = ""
    rounds: list[dict[str, Any] | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def values(self, figure: str) -> list[float | None]:
        return [None if r is None else _figure(r, figure) for r in self.rounds]


RATIOS = ("output_tok_s", "total_tok_s", "ttft_ms.p50", "ttft_ms.p90", "itl_ms.p50", "e2e_ms.p50")
FIGURES = (*RATIOS, "cached_tokens", "cached_tokens_of_others")


def _figure(summary: dict[str, Any], name: str) -> float | None:
    group, _, rank = name.partition(".")
    value: float | None = summary[group][rank] if rank else summary[group]
    return value


def base_url(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


async def served_model(url: str, headers: dict[str, str]) -> str:
    """NoServer if nobody answers there, or not as OpenAI's API does."""
    timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(url + "/v1/models") as response,
        ):
            if response.status != 200:
                raise NoServer(f"{url} answers /v1/models with HTTP {response.status}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        raise NoServer(f"{url} does not answer: {e or type(e).__name__}") from e
    except (ValueError, LookupError, TypeError) as e:
        raise NoServer(f"{url} names no model in /v1/models") from e


async def rest() -> None:
    await asyncio.sleep(REST_S)


async def compare(
    urls: Sequence[str], models: Sequence[str], load: Load, rounds: int, say: Callable[[str], None],
    run: Callable[[Load], Awaitable[Run]] = bench_load.run, rest: Callable[[], Awaitable[None]] = rest,
) -> dict[str, Any]:  # fmt: skip
    """models: one for all servers, or one each; empty ones are asked for. load.seed is the first round's."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    names = list(models) * len(urls) if len(models) == 1 else list(models)
    servers = [Server(base_url(url), name) for url, name in zip(urls, names, strict=True)]
    alive = [server for server in servers if await _greet(server, headers, load, run, say)]
    for number in range(rounds):
        turn = number % max(1, len(alive))
        for server in alive[turn:] + alive[:turn]:
            seeded = replace(load, url=server.url, model=server.model, seed=load.seed + number)
            await rest()
            await _one_round(server, seeded, number + 1, run, say)
    return report(servers, rounds)


async def _greet(
    server: Server, headers: dict[str, str], load: Load, run: Callable[[Load], Awaitable[Run]],
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """The model's name and a first small request; False, and the reason noted, where that fails."""
    try:
        server.model = server.model or await served_model(server.url, headers)
        small = replace(
            load, url=server.url, model=server.model, num_requests=1, concurrency=1, rate=0.0, prompt_words=4,
            prompt_tokens=0, shared_prefix=0.0, max_tokens=(4,), seed=random.SystemRandom().randrange(1 << 30),
        )  # fmt: skip
        if (first := await run(small)).errors:
            raise NoServer(f"{server.url} fails: {_kinds(first)}")
    except NoServer as e:
        server.errors.append(str(e))
        say(str(e))
        return False
    return True


async def _one_round(
    server: Server, load: Load, number: int, run: Callable[[Load], Awaitable[Run]], say: Callable[[str], None]
) -> None:
    result = await run(load)
    if result.errors:
        failed = sum(result.errors.values())
        sentence = f"{server.url}, round {number}: {failed} of {load.num_requests} requests failed ({_kinds(result)})"
        server.errors.append(sentence)
        server.rounds.append(None)
        say(sentence)
    else:
        summary = bench_stats.summary(result)
        server.rounds.append(summary)
        say(f"{server.url}, round {number}: {summary['output_tok_s']} output tok/s, "
            f"TTFT {summary['ttft_ms']['p50']} ms")  # fmt: skip


def _kinds(run: Run) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in run.errors.most_common(3))


def report(servers: Sequence[Server], rounds: int) -> dict[str, Any]:
    """A server without a whole round has no figures and is named with its errors; so is a ratio to it."""
    first, *others = servers
    return {
        "rounds": rounds,
        "servers": [_server_report(server) for server in servers],
        "ratios": [_ratio_report(first, other) for other in others],
        "failed": [server.url for server in servers if server.errors],
    }


def _server_report(server: Server) -> dict[str, Any]:
    figures = {name: bench_stats.spread(server.values(name)) for name in FIGURES}
    whole = sum(r is not None for r in server.rounds)
    return {"url": server.url, "model": server.model, "rounds": whole, "errors": server.errors} | figures


def _ratio_report(first: Server, other: Server) -> dict[str, Any]:
    ratios: dict[str, Any] = {}
    for name in RATIOS:
        pairs = zip(first.values(name), other.values(name), strict=False)
        ratios[name] = bench_stats.spread([a / b for a, b in pairs if a is not None and b])
    return {"first": first.url, "other": other.url} | ratios


def table(result: dict[str, Any]) -> str:
    """Figures of each server, then ratios to each but the first, for people."""
    lines = []
    for number, server in enumerate(result["servers"], 1):
        lines.append(f"{number}. {server['url']}  {server['model'] or '?'}  ({server['rounds']} whole rounds)")
        lines += [f"   {error}" for error in server["errors"]]
    heads = [str(n) for n in range(1, len(result["servers"]) + 1)]
    rows = [[_words(name), *(_cell(s[name]) for s in result["servers"])] for name in FIGURES]
    lines += ["", *_aligned([["", *heads], *rows])]
    if result["ratios"]:
        heads = [f"1 / {n}" for n in range(2, len(result["servers"]) + 1)]
        rows = [[_words(name), *(_cell(r[name]) for r in result["ratios"])] for name in RATIOS]
        lines += ["", *_aligned([["ratio, round by round", *heads], *rows])]
    return "\n".join(lines)


def _words(name: str) -> str:
    return name.replace("_", " ").replace(".", " ").replace("tok s", "tok/s")


def _cell(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread['median']:.4g} ({spread['min']:.4g}-{spread['max']:.4g})"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
