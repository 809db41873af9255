"""Who is killed, and how many of 800 requests are answered: `python -m tests.chaos.kill_table`, a row a service.

Eight clients ask a hundred times each; a third of the way one process of the row's kind gets SIGKILL, and is brought
back as `serve` does. Each row plainly, and for the gateway also with clients that come back at the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shared.protocol import MemberKind
from tests.chaos.play import ChaosStack
from tests.chaos.random_run import closing, listening
from tests.e2e.balanced import BalancedClient
from tests.e2e.clients import Answer, Client
from tests.e2e.load import USAGE, plain, words
from tests.e2e.own_redis import OwnRedis

NUM_CLIENTS, NUM_REQUESTS, NUM_TOKENS = 8, 100, 24
ENV: dict[str, object] = {"scripted_step_ms": 10, "scripted_token_ms": 0.2}
ROWS = ("nobody", "worker", "scheduler", "store", "gateway", "gateway, clients come back", "redis")


@dataclass
class Row:
    who: str
    whole: int = 0
    wrong: int = 0
    longest_pause_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"| {self.who} | {self.whole}/{NUM_CLIENTS * NUM_REQUESTS} | {self.wrong} | {self.longest_pause_s:.2f} | "
            f"{self.seconds:.1f} |"
        )


async def play(row: Row, folder: Path, num_requests: int) -> None:
    with OwnRedis(folder / "redis") as server:
        numbers = dict.fromkeys(("gateways", "schedulers", "stores", "workers"), 2)
        async with ChaosStack(server.url, folder / "stack", env=ENV, **numbers) as stack, stack.supervised():
            started, seen = time.perf_counter(), asyncio.Event()
            clients = [ask(row, stack, place, num_requests, seen) for place in range(NUM_CLIENTS)]
            await asyncio.gather(kill(row, stack, server, seen), *clients)
            row.seconds = time.perf_counter() - started


async def kill(row: Row, stack: ChaosStack, server: OwnRedis, seen: asyncio.Event) -> None:
    await seen.wait()
    kind = row.who.partition(",")[0]
    if kind == "redis":
        server.kill()
        await asyncio.to_thread(server.start)
    elif kind != "nobody":
        stack.kill(stack.process(cast(MemberKind, kind)))


async def ask(row: Row, stack: ChaosStack, place: int, num_requests: int, seen: asyncio.Event) -> None:
    urls = functools.partial(listening, stack)
    for i in range(num_requests):
        name = f"client {place} asks {i}"
        body = plain(name, NUM_TOKENS, **USAGE)
        gateways = urls()
        url = gateways[place % len(gateways)] if gateways else stack.url_of(place % 2)
        async with closing(Client(url, timeout_s=60)) as client:
            comes_back = row.who.endswith("come back")
            answer = await (BalancedClient(client, urls).ask(body) if comes_back else client.ask(body))
        count(row, answer, words(name, NUM_TOKENS))
        if place == 0 and i == num_requests // 3:
            seen.set()


def count(row: Row, answer: Answer, text: str) -> None:
    if answer.done and answer.text == text:
        row.whole += 1
        row.longest_pause_s = max(row.longest_pause_s, answer.longest_pause_s())
    elif answer.choices and not text.startswith(answer.text):
        row.wrong += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kill_table", description=__doc__)
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="a client")
    args = parser.parse_args()
    print_line("| killed | whole answers | wrong | longest pause, s | whole run, s |\n|---|---|---|---|---|")
    rows = [Row(who) for who in args.rows]
    for row in rows:
        asyncio.run(play(row, Path(tempfile.mkdtemp(prefix="headrace-kill-")), args.requests))
        print_line(str(row))
    return any(row.wrong for row in rows)


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
