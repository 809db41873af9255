"""Carries out what the core decides, and tells it what came of that.

Each action may be repeated: one whose reply is lost is done again, and the scripts see to it that nothing happens
twice. Decides nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from redis.exceptions import ResponseError

from services.scheduler.actions import (
    Action,
    Assign,
    Call,
    CheckPlaced,
    Expel,
    Finish,
    KeepDead,
    Offer,
    Plan,
    ReadRecord,
    Requeue,
)
from services.scheduler.core import SchedulerCore
from shared.protocol import Outcome
from shared.records import Records
from shared.runtime import all_of
from shared.scripts import Scripts
from shared.wire import ProtocolError, decode_as, encode, pack_ids, split_sequence_id

log = logging.getLogger(__name__)

MAX_CALL_BYTES = 256 * 1024  # of calls to a store in one message to Redis, and one call more
MAX_TOGETHER = 16  # records read, or sequences assigned, without waiting for the reply to the one before
ENGINE_FAILED = "the engine failed on this request alone"
UNREADABLE = Outcome(reason="error", code="internal_error", message="the request's records cannot be read")


class Executor:
    """on_fenced: called when a worker turns out to be another scheduler's."""

    def __init__(
        self, scripts: Scripts, records: Records, clock: Callable[[], float], on_fenced: Callable[[], None]
    ) -> None:
        self._scripts = scripts
        self._records = records
        self._clock = clock
        self._on_fenced = on_fenced

    async def carry_out(self, todo: Sequence[Action], core: SchedulerCore) -> int:
        """The first one, and those after it that go along in the same call to a store, or that need not wait for its
        reply; how many. They are sent in order; where one's reply is lost all are to be repeated."""
        if isinstance(todo[0], Call):
            return await self._call(todo[0].store, todo, core)
        together = _together(todo)
        await all_of(self._carry_out_or_give_up(action, core) for action in together)
        return len(together)

    async def _carry_out_or_give_up(self, action: Action, core: SchedulerCore) -> None:
        try:
            await self._carry_out_one(action, core)
        except ResponseError as e:
            self._give_up(action, core, e)

    def _give_up(self, action: Action, core: SchedulerCore, error: ResponseError) -> None:
        """A script fails for a sequence whose record makes no sense: the others go on without it. An action about a
        worker has no such excuse."""
        match action:
            case ReadRecord():
                core.on_record(action.sid, None, b"")
            case Assign():
                core.on_assigned(action, "stale", self._clock())
            case Offer():
                core.on_offered(action, "stale")
            case Requeue() | Finish() | KeepDead():
                pass
            case _:
                raise error
        log.error("%s of %s fails in Redis: %s", type(action).__name__, action.sid, error)

    async def _carry_out_one(self, action: Action, core: SchedulerCore) -> None:
        match action:
            case ReadRecord():
                await self._read_record(action, core)
            case Plan():
                await self._plan(action, core)
            case Assign():
                await self._assign(action, core)
            case Offer():
                core.on_offered(action, await self._scripts.offer(action.sid, action.epoch, action.scheduler))
            case Requeue():
                await self._scripts.requeue(action.sid, action.epoch)
            case Finish():
                await self._scripts.finish(action.sid, action.outcome, action.epoch)
            case KeepDead():
                await self._keep_dead(action.sid)
            case CheckPlaced():
                await self._check_placed(action, core)
            case Expel():
                log.error("%s makes no step any more and is given up", action.worker)
                await self._scripts.gone("worker", action.worker)
                core.lose_worker(action.worker)

    async def _keep_dead(self, sid: str) -> None:
        """Not what the worker found wrong with the request itself: its client was told."""
        record = await self._records.sequence(sid)
        try:
            outcome = None if record is None or not record.outcome else decode_as(Outcome, record.outcome)
        except ProtocolError as e:
            log.error("how %s has ended cannot be read: %s", sid, e)
            return
        if outcome is not None and outcome.code == "engine_error":
            await self._scripts.keep_dead(sid, ENGINE_FAILED)

    async def _read_record(self, action: ReadRecord, core: SchedulerCore) -> None:
        rid, _ = split_sequence_id(action.sid)
        queued = core.queue.get(action.sid)
        try:
            record = await self._records.request(rid)
            if record is None or queued is None:
                core.on_record(action.sid, None, b"")
                return
            num_prompt_tokens = queued.num_prompt_tokens
            if not record.spec.num_prompt_tokens == num_prompt_tokens == len(record.prompt) / 4 > 0:
                raise ProtocolError("the prompt is not as long as is said")
            ids, position = [record.prompt], record.spec.log_start
            if queued.epoch > 0:
                chunks = await self._records.log(action.sid)
                ids += [pack_ids(chunk.ids) for chunk in chunks if chunk.first >= 0]
                position += sum(len(chunk.ids) for chunk in chunks)
        except ProtocolError as e:
            log.error("the records of %s cannot be read: %s", action.sid, e)
            await self._scripts.finish(action.sid, UNREADABLE)
            core.on_record(action.sid, None, b"")
            return
        draws = record.spec.sampling.max_tokens > 0
        core.on_record(action.sid, b"".join(ids), record.spec.salt, scoring=position < 0, draws=draws)

    async def _call(self, store: str, todo: Sequence[Action], core: SchedulerCore) -> int:
        workers, messages = _calls(store, todo)
        if not await self._scripts.send(f"cache:{store}", *messages):
            for worker in workers:
                core.lose_store(worker, store)  # the scan finds its successor
        return len(messages)

    async def _plan(self, action: Plan, core: SchedulerCore) -> None:
        changes = [encode(c) for c in action.changes]
        status = await self._scripts.plan("run", action.worker, action.term, changes, action.number)
        self._check_lease(core, action.worker, action.term, status)

    async def _assign(self, action: Assign, core: SchedulerCore) -> None:
        admit = encode(action.admit)
        status = await self._scripts.assign(action.sid, action.epoch, action.worker, action.term, admit)
        core.on_assigned(action, status, self._clock())
        self._check_lease(core, action.worker, action.term, status)

    def _check_lease(self, core: SchedulerCore, worker: str, term: int, status: str) -> None:
        """fenced: another scheduler has the worker. gone: it reads no more, and will come back under another name."""
        view = core.workers.get(worker)
        if status in ("fenced", "gone") and view is not None and view.term == term:
            core.lose_worker(worker)
        if status == "fenced":
            self._on_fenced()

    async def _check_placed(self, action: CheckPlaced, core: SchedulerCore) -> None:
        worker = action.worker
        for sid in await self._records.placed_on(worker):
            record = await self._records.sequence(sid)
            if record is None or record.state != "placed" or record.worker != worker:
                continue
            if (sid, record.epoch) in action.shown:
                deadlines = await self._records.deadlines(split_sequence_id(sid)[0])
                core.on_placed(worker, sid, record, deadlines)
            else:
                await self._scripts.requeue(sid, record.epoch)


def _together(todo: Sequence[Action]) -> list[Action]:
    """The first, and those after it that do the same for other sequences: nothing of one depends on another's."""
    kind = type(todo[0])
    alike = itertools.takewhile(lambda action: type(action) is kind, todo)
    return list(itertools.islice(alike, MAX_TOGETHER if kind in (ReadRecord, Assign) else 1))


def _calls(store: str, todo: Sequence[Action]) -> tuple[set[str], list[bytes]]:
    """The calls to this store that `todo` begins with, encoded, as many as one message to Redis should hold; and the
    workers that they are about."""
    workers: set[str] = set()
    messages: list[bytes] = []
    for action in todo:
        if not isinstance(action, Call) or action.store != store or sum(map(len, messages)) >= MAX_CALL_BYTES:
            break
        workers.add(action.message.worker)
        messages.append(encode(action.message))
    return workers, messages
