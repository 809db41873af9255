"""How long clients wait when a worker of the default model is killed and another is there: by its lease, and reported.

PYTHONPATH=. python -m tests.bench.kill_worker
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared.embedded_redis import find_server
from shared.model_source import default_cache_dir, resolve
from shared.settings import DEFAULT_MODEL
from tests import helpers
from tests.e2e.clients import Client
from tests.e2e.stack import Stack
from tests.helpers import wait_until

CASES = ((1, False), (1, True), (2, False), (2, True))  # streams, and whether a supervisor reports the death
SETTINGS = {"threads": 1, "kv_cache_bytes": 256 << 20, "max_model_len": 1024, "speculative_config": "none"}
NUM_TOKENS = 45


def body(name: str) -> dict[str, Any]:
    prompt = f"Story {name}. " + "The lighthouse keeper counted the ships and the stars. " * 6
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}


async def once(stack: Stack, client: Client, num_streams: int, reported: bool) -> str:
    state = stack.state
    names = [f"{num_streams} {reported} {i}" for i in range(num_streams)]
    answering = [asyncio.ensure_future(client.ask(body(name))) for name in names]
    await wait_until(lambda: [s.num_tokens > 10 for s in state.running()] == [True] * num_streams, 60)
    places = [s.worker for s in state.running()]
    victim = stack.by_incarnation(max(places, key=places.count))
    lost = [s.sid for s in state.running() if s.worker == victim.incarnation]
    killed_at = stack.kill(victim)
    if reported:
        await stack.report(victim)
    await wait_until(lambda: any((s := state.sequence(sid)) and s.strikes for sid in lost), 20, every=0.002)
    noticed_s = time.perf_counter() - killed_at
    answers = await asyncio.gather(*answering)
    assert all(answer.done for answer in answers)
    pauses = ", ".join(f"{answer.longest_pause_s(killed_at):.2f}" for answer in answers)
    await stack.restart(victim)
    await wait_until(state.all_leased, 30)
    return f"noticed after {noticed_s:.2f} s, {len(lost)} moved, pauses {pauses} s"


async def main() -> None:
    folder = Path(tempfile.mkdtemp())
    model = resolve(DEFAULT_MODEL, default_cache_dir()).path
    with helpers.running_redis(find_server(), folder / "redis") as url:
        async with Stack(url, folder / "stack", model=str(model), workers=2, env=SETTINGS) as stack:
            client = Client(stack.url, 90)
            for num_streams, reported in CASES:
                figures = await once(stack, client, num_streams, reported)
                how = "reported by a supervisor" if reported else "by its lease"
                sys.stdout.write(f"{num_streams} streams, {how}: {figures}\n")
            await client.close()


if __name__ == "__main__":
    asyncio.run(main())
