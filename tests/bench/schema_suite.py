"""Answers by the schemas of a public suite, from a real server: what ends is valid, the rest is refused soon.

    python -m tests.bench.schema_suite FOLDER [--schemas 300] [--model M] [--clients 8] [--max-tokens 200] [-- OPTION…]

FOLDER is a checkout of json-schema-org/JSON-Schema-Test-Suite (its groups' schemas), or has a schema in each of its
`.json` files, as guidance-ai/jsonschemabench has them under `data`. Distinct schemas are taken at random until so many
are admitted, one at a time, so that the time of a refusal is its own. Each of those is then asked for at temperature 1,
and what ends with `stop` is judged by `jsonschema_rs`, formats too. A line of JSON with counts; fails where an answer
is not valid, a refusal took a second, or a status is neither 200 nor 400. Everything behind `--` is an option of
`headrace serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs

from tests.bench.performance_stack import serving
from tests.gpu_worker.schemas import OTHER_MEANINGS

MAX_REFUSAL_S = 1.0
JUDGES: dict[str, Any] = {
    "draft2020-12": jsonschema_rs.Draft202012Validator, "draft2019-09": jsonschema_rs.Draft201909Validator,
    "draft7": jsonschema_rs.Draft7Validator, "draft6": jsonschema_rs.Draft6Validator,
    "draft4": jsonschema_rs.Draft4Validator,
}  # fmt: skip
PROMPT = "Here is an example of such a value, as JSON:\n"


def schemas_in(folder: Path) -> list[tuple[str, Any]]:
    """Distinct ones, by where they stand."""
    found: dict[str, tuple[str, Any]] = {}
    for place, schema in _of_groups(folder) if (folder / "tests").is_dir() else _of_files(folder):
        found.setdefault(json.dumps(schema, sort_keys=True), (place, schema))
    return list(found.values())


def _of_groups(folder: Path) -> Iterator[tuple[str, Any]]:
    for draft in JUDGES:
        for path in sorted((folder / "tests" / draft).rglob("*.json")):
            if path.name not in OTHER_MEANINGS:
                for group in json.loads(path.read_text()):
                    yield f"{draft}/{path.name}: {group['description']}", group["schema"]


def _of_files(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("*.json")):
        try:
            yield str(path.relative_to(folder)), json.loads(path.read_text())
        except ValueError:
            continue  # no file of a suite's schemas


class Asking:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self.wrong: list[str] = []

    async def ask(self, schema: Any, max_tokens: int, seed: int) -> tuple[int, dict[str, Any]]:
        body = {
            "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 1, "seed": seed,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        }  # fmt: skip
        async with self._session.post(self._url, json=body) as response:
            return response.status, await response.json()

    async def sort(self, schemas: list[tuple[str, Any]], num: int) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
        """Those that are admitted; why the others are not, and how long that took to say."""
        admitted, reasons, took = [], collections.Counter[str](), []
        for place, schema in schemas:
            if len(admitted) == num:
                break
            began = time.perf_counter()
            status, answer = await self.ask(schema, 1, 0)
            seconds = time.perf_counter() - began
            if status == 200:
                admitted.append((place, schema))
                continue
            took.append(seconds)
            reasons[_reason(answer["error"])] += 1
            if status != 400 or seconds >= MAX_REFUSAL_S:
                self.wrong.append(f"{place}: {status} after {seconds:.2f} s: {answer['error']['message']}")
        return admitted, {
            "admitted": len(admitted), "refused": len(took), "longest_refusal_s": round(max(took, default=0), 3),
            "reasons": dict(reasons.most_common()),
        }  # fmt: skip

    async def judge(self, schemas: list[tuple[str, Any]], max_tokens: int, clients: int) -> dict[str, int]:
        """How the answers ended."""
        waiting, ends = iter(enumerate(schemas)), collections.Counter[str]()

        async def client() -> None:
            for seed, (place, schema) in waiting:
                status, answer = await self.ask(schema, max_tokens, seed)
                choice = answer["choices"][0] if status == 200 else {"finish_reason": str(status), "text": ""}
                ends[choice["finish_reason"]] += 1
                if status != 200:
                    self.wrong.append(f"{place}: {status}: {answer['error']['message']}")
                elif choice["finish_reason"] == "stop" and not is_valid(place, schema, choice["text"]):
                    self.wrong.append(f"{place}: {choice['text']!r} is not valid")

        await asyncio.gather(*(client() for _ in range(clients)))
        return dict(ends)


def _reason(error: dict[str, Any]) -> str:
    """Where a keyword is named, that one; else the sentence."""
    if error["code"] == "unsupported_schema":
        return str(error["param"]).rpartition(".")[2].partition("[")[0]
    return str(error["message"]).partition(" ")[2][:80]


def is_valid(place: str, schema: Any, text: str) -> bool:
    """By the dialect that it names, or that its folder has; one of no known dialect by the newest."""
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    if dialect is None:
        validator = JUDGES.get(place.partition("/")[0], jsonschema_rs.validator_for)(schema, validate_formats=True)
    elif "//json-schema.org/" in dialect:
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    else:
        plain = {name: value for name, value in schema.items() if name != "$schema"}
        validator = jsonschema_rs.validator_for(plain, validate_formats=True)
    return bool(validator.is_valid(json.loads(text)))


async def run(url: str, args: argparse.Namespace) -> bool:
    schemas = schemas_in(Path(args.folder))
    random.Random(args.seed).shuffle(schemas)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:
        asking = Asking(session, url)
        admitted, counts = await asking.sort(schemas, args.schemas)
        ends = await asking.judge(admitted, args.max_tokens, args.clients)
    enough = len(admitted) == args.schemas
    sys.stdout.write(json.dumps({"distinct": len(schemas), **counts, "ends": ends, "wrong": len(asking.wrong)}) + "\n")
    sys.stderr.write("".join(f"{line}\n" for line in asking.wrong))
    if not enough:
        sys.stderr.write(f"only {len(admitted)} of {args.schemas} schemas are supported\n")
    return enough and not asking.wrong


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("folder")
    ap.add_argument("--schemas", type=int, default=300)
    ap.add_argument("--model", default="")
    ap.add_argument("--clients", type=int, default=8)
    ap.add_argument("--max-tokens", type=int, default=200)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--port", type=int, default=8796)
    ap.add_argument("options", nargs="*")
    args = ap.parse_args()
    with serving(args.model, args.port, *args.options) as stack:
        return 0 if asyncio.run(run(stack.url, args)) else 1


if __name__ == "__main__":
    sys.exit(main())
