"""What a new worker gains from another's answers: the same requests with their tenant's statistics and without.

    python -m tests.bench.fleet_gain [--teach N] [--ask N] [--kinds form,letter,schema,class,yaml,table,logs]

Real processes, a real Redis, the default model. Worker A answers requests of a kind, and is killed; worker B, just
started, answers others of that kind, each twice in turns: for a tenant that has had no answer before, which is its cold
start, and for A's, in either order; each time with its prompt in the cache. A line of JSON for each kind: tokens a
second cold, the ratio of the times (the median, the smallest, the largest, and the first), and whether all answers were
the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from shared.embedded_redis import find_server
from shared.settings import DEFAULT_MODEL
from tests import helpers
from tests.e2e.stack import Stack

PEOPLE = [
    ("Anna Berg", 31, "Oslo", "baker"), ("Tom Hill", 44, "Leeds", "driver"), ("Mia Rossi", 27, "Turin", "nurse"),
    ("Jan Novak", 52, "Brno", "teacher"), ("Lea Kahn", 36, "Basel", "pilot"), ("Omar Aziz", 29, "Cairo", "cook"),
    ("Eva Lind", 61, "Malmo", "judge"), ("Raj Patel", 40, "Pune", "clerk"), ("Sue Park", 33, "Busan", "painter"),
    ("Max Wolf", 48, "Bonn", "doctor"), ("Ida Holm", 25, "Bergen", "farmer"), ("Leo Cruz", 57, "Cadiz", "sailor"),
    ("Amy Reed", 38, "Derby", "lawyer"), ("Ben Katz", 45, "Haifa", "miner"), ("Kim Choi", 30, "Seoul", "dancer"),
    ("Pia Moro", 54, "Parma", "singer"),
]  # fmt: skip
THINGS = [
    "User", "Order", "Product", "Invoice", "Ticket", "Booking", "Customer", "Payment", "Address", "Message", "Task",
    "Event", "Parcel", "Contract", "Vehicle", "Room",
]  # fmt: skip
FORM = (
    'Turn this into a JSON object with the keys "first_name", "last_name", "age", "city", "profession", "country", '
    '"active". Answer with JSON only.\n\n{} is {} years old, lives in {} and works as a {}.'
)
LETTER = (
    "Write a short and polite e-mail to {}: the order number {} has arrived damaged and is replaced free of charge. "
    "Sign it as the customer service of Northwind Parcel."
)
CLASS = "Write a Python dataclass {} with the fields id, name, created_at, and methods to_dict, from_dict and validate."
SCHEMA = (
    "Write a JSON schema for a {} with the properties id, name, created_at and status, all of them required. "
    "Answer with JSON only."
)
SERVICE = "Write the YAML configuration of the service {}: {} in {} owns it, its port is {}."
SERVICE_FORM = (
    r"service:\n  name: [a-z]{3,12}\n  image: [a-z]{3,9}/[a-z]{3,9}\n  network:\n    host: [a-z]{3,9}\.example\.com\n"
    r"    port: [0-9]{4}\n    protocol: http\n  resources:\n    memory: [0-9]{1,2} Gi\n  owner: [A-Z][a-z]{2,8}\n"
    r"  city: [A-Z][a-z]{2,8}\n"
)
ORDER = "Write a letter to {} in {}: {} chairs at {} dollars and {} lamps at {} dollars are on their way."
ORDER_FORM = (
    r"Dear [A-Z][a-z]{2,8} [A-Z][a-z]{2,8},\n\nThank you for your order. We deliver it to [A-Z][a-z]{2,8} within "
    r"[2-9] days.\n\n\| Item \| Quantity \| Price \|\n\|---\|---\|---\|\n"
    r"(\| [a-z]{3,9} \| [0-9]{1,2} \| [0-9]{1,3} dollars \|\n){2}\nKind regards,\nNorthwind Shop"
)
EVENTS = (
    "Write log lines of the service {}: at {}:{:02d} it starts, {} logs in from {}, the order {} is stored, it stops."
)
EVENTS_FORM = (
    r"([0-9]{2}:[0-9]{2}:[0-9]{2} INFO \[[a-z]{3,9}\] (service started|user [a-z]{3,9} logged in from [A-Z][a-z]{2,8}"
    r"|order [0-9]{4} was stored|service stopped)\n){5}"
)
KINDS = {
    "form": [FORM.format(*person) for person in PEOPLE],
    "letter": [LETTER.format(name, 1000 + 7 * age) for name, age, _, _ in PEOPLE],
    "schema": [SCHEMA.format(thing.lower()) for thing in THINGS],
    "class": [CLASS.format(thing) for thing in THINGS],
    "yaml": [
        SERVICE.format(thing.lower(), name.split()[0], city, 8000 + 7 * age)
        for (name, age, city, _), thing in zip(PEOPLE, THINGS, strict=True)
    ],
    "table": [ORDER.format(name, city, age % 9 + 2, age + 20, age % 5 + 1, age + 3) for name, age, city, _ in PEOPLE],
    "logs": [
        EVENTS.format(thing.lower(), age % 12 + 8, age, name.split()[0].lower(), city, 1000 + 37 * age)
        for (name, age, city, _), thing in zip(PEOPLE, THINGS, strict=True)
    ],
}
FORMS = {"yaml": SERVICE_FORM, "table": ORDER_FORM, "logs": EVENTS_FORM}  # regular expressions that answers are held to
NUM_OUTPUT = 200
NUM_FIRST = 3  # requests of another kind that a new worker answers before: its very first ones are slow
LEARNT_TIMEOUT_S = 60.0
SETTINGS: dict[str, object] = {
    "speculative_config": '{"method": "suffix"}', "max_model_len": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    seconds: float
    num_tokens: int
    text: str


class Asker:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def ask(self, text: str, tenant: str, form: str = "") -> Answer:
        """With the prompt in the cache, so that what is measured is the answer."""
        body: dict[str, Any] = {
            "model": self._model, "messages": [{"role": "user", "content": text}], "temperature": 0,
            "cache_salt": tenant,
        }  # fmt: skip
        if form:
            body["structured_outputs"] = {"regex": form}
        await self._post(body | {"max_tokens": 1, "speculative": {"fleet": False}})
        started = time.perf_counter()
        answer = await self._post(body | {"max_tokens": NUM_OUTPUT})
        seconds = time.perf_counter() - started
        return Answer(seconds, answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"])

    async def _post(self, body: dict[str, Any]) -> Any:
        async with self._session.post(self._url + "/v1/chat/completions", json=body) as response:
            return await response.json()

    async def num_learnt(self) -> float:
        async with self._session.get(self._url + "/metrics") as response:
            text = await response.text()
        found = re.findall(r'^headrace_fleet_total\{[^}]*count="answers_learnt"[^}]*\} (\S+)', text, re.MULTILINE)
        return sum(map(float, found))


async def measure(redis_url: str, folder: Path, kind: str, num_taught: int, num_asked: int) -> dict[str, Any]:
    texts, form = KINDS[kind], FORMS.get(kind, "")
    stack = Stack(redis_url, folder, model=DEFAULT_MODEL, env=SETTINGS)
    async with stack, aiohttp.ClientSession() as session:
        asker = Asker(session, stack.url, stack.served_name)
        for text in texts[:num_taught]:
            await asker.ask(text, "tenant", form)

        async def all_learnt() -> bool:
            return await asker.num_learnt() >= num_taught

        await helpers.wait_until(all_learnt, LEARNT_TIMEOUT_S, every=0.2)
        worker = stack.process("worker")
        stack.kill(worker)
        await asyncio.to_thread(worker.popen.wait, 10)
        await stack.restart(worker)
        await helpers.wait_until(stack.state.all_leased, LEARNT_TIMEOUT_S)
        for number in range(NUM_FIRST):
            await asker.ask("Tell me a story about a fox and a lighthouse.", f"first {number}")
        cold, warm = list[Answer](), list[Answer]()
        for number, text in enumerate(texts[num_taught : num_taught + num_asked]):
            turns = [(cold, f"nobody {number}"), (warm, "tenant")]
            for answers, tenant in turns if number % 2 else turns[::-1]:
                answers.append(await asker.ask(text, tenant, form))
    pairs = list(zip(cold, warm, strict=True))
    ratios = [c.seconds / w.seconds for c, w in pairs]
    return {
        "kind": kind, "taught": num_taught, "asked": len(cold),
        "tok_s_cold": round(sum(c.num_tokens for c in cold) / sum(c.seconds for c in cold), 1),
        "ratio": round(statistics.median(ratios), 3), "from": round(min(ratios), 3), "to": round(max(ratios), 3),
        "first": round(ratios[0], 3),
        "same": all((c.num_tokens, c.text) == (w.num_tokens, w.text) for c, w in pairs),
    }  # fmt: skip


async def measure_all(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-fleet-") as folder:
        (Path(folder) / "redis").mkdir()
        with helpers.running_redis(find_server(), Path(folder) / "redis") as redis_url:
            for kind in args.kinds.split(","):
                line = await measure(redis_url, Path(folder) / kind, kind, args.teach, args.ask)
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--teach", type=int, default=10)
    ap.add_argument("--ask", type=int, default=6)
    ap.add_argument("--kinds", default=",".join(KINDS))
    asyncio.run(measure_all(ap.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
