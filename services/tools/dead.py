"""`headrace dead`: requests that workers died of or an engine failed on, for people: which, why, and running one again.

Reads what a scheduler kept (`dead`) and, as long as that is retained, the request's record. Never shows a prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Sequence

from shared import bus
from shared.embedded_redis import socket_path
from shared.options import add_options, given
from shared.protocol import Outcome, TimeLimits
from shared.records import DeadRecord, Records
from shared.runtime import EXIT_CONFIG
from shared.scripts import Scripts
from shared.settings import CommonSettings, SettingsError, current_environ, load, variable
from shared.wire import decode_as, sequence_id, split_sequence_id

MAX_LISTED = 1000
RESUME_MS = 3_600_000  # that a retry goes on with nobody who reads it
LOOK_S = 0.2
USED = {"redis_url", "model", "served_model_name", "state_dir"}


class NotThere(Exception):
    """One sentence for the operator."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="headrace dead", usage="headrace dead list | show ID | retry ID [options]", allow_abbrev=False,
        description="Requests that workers died of, or the engine failed on alone. ID: as listed.",
        epilog="Example: headrace dead list --redis-url redis://db:6379/0",
    )  # fmt: skip
    parser.add_argument("action", choices=("list", "show", "retry"), metavar="list|show|retry")
    parser.add_argument("id", nargs="?", default="", metavar="ID")
    add_options(parser, [CommonSettings], set(CommonSettings.model_fields) - USED)
    options = parser.parse_args(argv)
    if (options.action == "list") == bool(options.id):
        parser.error("list takes no ID" if options.id else f"{options.action} needs an ID, as `list` shows it")
    try:
        common = load(CommonSettings, current_environ() | given(options, [CommonSettings]))
        asyncio.run(_run(common, options.action, options.id))
    except SettingsError as e:
        sys.stderr.write(f"headrace dead: {e}\n")
        return EXIT_CONFIG
    except (NotThere, *bus.LOST) as e:
        sys.stderr.write(f"headrace dead: {e}\n")
        return 1
    return 0


def redis_url_of(common: CommonSettings) -> str:
    """The one that is given; else that of a `serve` on this machine, if it runs."""
    embedded = socket_path(common.state_dir)
    is_given = variable("redis_url") in current_environ() or "redis_url" in common.model_fields_set
    return common.redis_address if is_given or not embedded.exists() else f"unix://{embedded}"


async def _run(common: CommonSettings, action: str, id: str) -> None:
    client = bus.connect(redis_url_of(common))
    scripts = Scripts(client, common.served_name)
    desk = DeadDesk(scripts, Records(client, scripts.prefix))
    try:
        if action == "list":
            await desk.list()
        else:
            await (desk.show(id) if action == "show" else desk.retry(id))
    finally:
        await client.aclose()


class DeadDesk:
    """What the commands do, on a deployment's Redis."""

    def __init__(self, scripts: Scripts, records: Records) -> None:
        self._scripts = scripts
        self._records = records

    async def list(self) -> None:
        dead = await self._records.dead(MAX_LISTED)
        if not dead:
            _print("No request has been given up.")
        for record in dead:
            rid, _ = split_sequence_id(record.sid)
            kept = "can be retried" if await self._records.retained_ms(rid) else "record expired"
            _print(f"{_when(record)}  {record.sid}  {record.fields.get('reason', '')}; {kept}")

    async def show(self, id: str) -> None:
        record = await self._find(id)
        rid, choice = split_sequence_id(record.sid)
        _print(f"sequence       {record.sid} (choice {choice} of request {rid})")
        _print(f"given up       {_when(record)}: {record.fields.get('reason', '')}")
        for name, text in (("deaths", "deaths"), ("worker", "last worker"), ("prompt", "prompt tokens"),
                           ("output", "output tokens")):  # fmt: skip
            _print(f"{text:<14} {record.fields.get(name, '')}")
        request = await self._records.request(rid)
        if request is None:
            _print("record         expired: it cannot be retried")
            return
        _print(f"record         kept for {await self._records.retained_ms(rid) / 1000:.0f} s more")
        _print(f"API key        {request.owner or 'none'}")
        _print(f"parameters     {request.spec.sampling.model_dump_json(exclude_defaults=True)}")

    async def retry(self, id: str) -> None:
        """Until it has ended; says how. It begins with its strikes: where those were too many, one more ends it."""
        record = await self._find(id)
        old, _ = split_sequence_id(record.sid)
        request = await self._records.request(old)
        if request is None:
            raise NotThere(f"the record of {old} has expired; a longer --retention-s keeps records longer")
        rid = secrets.token_hex(16)
        spec = request.spec.model_copy(update={"rid": rid, "time_limits": TimeLimits()})
        if await self._scripts.retry(old, spec, int(record.fields["deaths"]), RESUME_MS) == "gone":
            raise NotThere(f"the record of {old} has expired")
        alone = ", in steps of its own; one more worker death ends it" if int(record.fields["deaths"]) else ""
        _print(f"runs again as request {rid}{alone}")
        for choice in range(spec.num_choices):
            await self._await_end(sequence_id(rid, choice))

    async def _await_end(self, sid: str) -> None:
        record = await self._records.sequence(sid)
        while record is not None and record.state != "done":
            await asyncio.sleep(LOOK_S)
            record = await self._records.sequence(sid)
        if record is None:
            raise NotThere(f"the record of {sid} has expired")
        outcome = decode_as(Outcome, record.outcome)
        how = f"{outcome.code}: {outcome.message}" if outcome.reason == "error" else outcome.reason
        _print(f"{sid} ended after {record.num_tokens} tokens: {how}")

    async def _find(self, id: str) -> DeadRecord:
        """By the name of the sequence or of its request."""
        for record in await self._records.dead(MAX_LISTED):
            if id in (record.sid, record.sid.rpartition(".")[0]):
                return record
        raise NotThere(f"{id} is not among the last {MAX_LISTED} that were given up")


def _when(record: DeadRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.at_s))


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
