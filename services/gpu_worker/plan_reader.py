"""From an entry of the plan stream to a change that the running set can apply.

Reads the records of an `Admit` from Redis, once; ends a sequence whose records cannot be read. Decides nothing else.
The plan waits for no grammar: `answer_maker.py` compiles those meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection

from services.gpu_worker.admission import Admission, NotRunnable, read_admission
from services.gpu_worker.running_set import Change
from shared.bus import Entry
from shared.protocol import Outcome
from shared.records import Records
from shared.runtime import all_of
from shared.scripts import Scripts
from shared.store_calls import FleetChanges
from shared.wire import ProtocolError, decode, split_sequence_id
from shared.worker_protocol import Admit

log = logging.getLogger(__name__)

MAX_TOGETHER = 16  # changes; each may have a megabyte of prompt


async def read_changes(
    entries: Collection[Entry], worker: str, scripts: Scripts, records: Records
) -> list[Change | FleetChanges | None]:
    """As `read_change`, of the first entries, whose records are asked for together: one answer is waited for, not each
    in turn."""
    first = itertools.islice(entries, MAX_TOGETHER)
    return await all_of(read_change(entry, worker, scripts, records) for entry in first)


async def read_change(entry: Entry, worker: str, scripts: Scripts, records: Records) -> Change | FleetChanges | None:
    """None for what is no plan change; a store's answer comes along with those. May be repeated."""
    fields = entry.fields
    if b"m" not in fields:
        return None  # written by `join`
    try:
        message = decode(fields[b"m"])
        if isinstance(message, FleetChanges):
            return message
        kind, term = fields[b"k"].decode(), int(fields[b"t"])
    except (KeyError, ValueError) as e:
        log.error("a plan change is not ours, left out: %s", e)
        return None
    if not isinstance(message, Admit):
        return Change(kind, term, message)
    return Change(kind, term, message, await _read_records(message, worker, scripts, records))


async def _read_records(admit: Admit, worker: str, scripts: Scripts, records: Records) -> Admission | NotRunnable:
    rid, _ = split_sequence_id(admit.sid)
    try:
        request, record = await asyncio.gather(records.request(rid), records.sequence(admit.sid))
        chunks = await records.log(admit.sid) if record is not None and record.num_tokens else []
        return read_admission(admit, worker, request, record, chunks)
    except ProtocolError as e:
        log.error("the records of %s cannot be read: %s", admit.sid, e)
        outcome = Outcome(reason="error", code="internal_error", message="the request's records cannot be read")
        await scripts.finish(admit.sid, outcome, admit.epoch)
        return NotRunnable("error")
