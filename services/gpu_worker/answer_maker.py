"""Makes what holds answers to their grammars, in threads, while the plan and the engine go on.

A grammar may take a second, and so may a long answer that is taken up again. Decides nothing: what is made is handed
over as a change of its own, which means nothing to a sequence that has left meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from services.gpu_worker.admission import Admission, Answered
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.grammar import GrammarError, Grammars
from services.gpu_worker.running_set import Change
from shared.worker_protocol import Admit

log = logging.getLogger(__name__)

NUM_THREADS = 2  # so that a slow one does not hold up the others
IMPOSSIBLE = "structured output: not possible with this model"


class AnswerMaker:
    """engine_loop: is given what is made."""

    def __init__(self, grammars: Grammars, engine_loop: EngineLoop) -> None:
        self._grammars = grammars
        self._engine_loop = engine_loop
        self._free = asyncio.Semaphore(NUM_THREADS)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, change: Change) -> None:
        """For an `Admit` whose request has a constraint, once it is submitted; returns at once."""
        admit, admission = change.message, change.admission
        if not isinstance(admit, Admit) or not isinstance(admission, Admission) or not admission.params.constraint:
            return
        task = asyncio.ensure_future(self._make(admit.sid, admit.epoch, admission))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, sid: str, epoch: int, admission: Admission) -> None:
        async with self._free:
            if self._engine_loop.awaits_answer(sid, epoch):  # else it has left before its turn
                self._engine_loop.submit(await asyncio.to_thread(_made, sid, epoch, admission, self._grammars))


def _made(sid: str, epoch: int, admission: Admission, grammars: Grammars) -> Answered:
    params = admission.params
    assert params.constraint is not None
    try:
        answer = grammars.begin(params.constraint, params.stop_token_ids)
        answer.mask_after(admission.output_ids)
    except GrammarError as e:
        return Answered(sid, epoch, problem=f"structured output: {e}")
    except Exception:  # of the model's files, or a bug: this sequence must not wait for ever
        log.exception("what holds %s to its grammar cannot be made", sid)
        return Answered(sid, epoch, problem=IMPOSSIBLE)
    return Answered(sid, epoch, answer)
