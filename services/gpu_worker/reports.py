"""What a worker tells its scheduler about the running set, as messages. *Pure.*"""

from __future__ import annotations

from services.gpu_worker.batch import Sequence
from services.gpu_worker.outbox import Carried, cut_seals
from services.gpu_worker.running_set import RunningSet
from services.gpu_worker.seals import seal_of
from services.gpu_worker.step_cost import StepCost
from shared.worker_protocol import Report, RunningSequence, RunningState, TakeOver

MAX_STATE_SEAL_BYTES = 256 * 1024  # in a running state; the rest follows in reports


def report(
    running: RunningSet,
    carried: Carried,
    *,
    worker: str,
    term: int,
    num_steps: int,
    cost: StepCost,
    hang_s: float = 0.0,
) -> Report:
    """term: of the scheduler that it goes to."""
    return Report.unchecked(
        worker=worker, term=term, pool_term=running.pool_term,
        running=tuple(_row(running, s) for s in running.sequences.values()),
        spare_block_ids=tuple(sorted(running.blocks.spares)), taken=carried.taken, seals=carried.seals,
        ended=carried.ended, num_steps=num_steps, tokens_per_second=cost.tokens_per_second,
        prefill_tokens_per_second=cost.prefill_tokens_per_second, hang_s=hang_s,
        taken_from=carried.taken_from,
    )  # fmt: skip


def running_state(running: RunningSet, worker: str, question: TakeOver) -> RunningState:
    """Everything, for a scheduler that takes over. Seals that do not fit are left in the outbox, for reports."""
    size = running.info.block_size
    seals = [seal_of(s, i, size) for s in running.sequences.values() for i in range(s.num_sealed)]
    fitting, rest = cut_seals(seals, MAX_STATE_SEAL_BYTES)
    running.outbox.superseded(rest)
    rows = tuple(
        _row(running, s).model_copy(update={"block_ids": tuple(s.block_ids), "salt": s.salt})
        for s in running.sequences.values()
    )
    return RunningState(
        worker=worker, term=question.term, pool_term=running.pool_term, running=rows, seals=tuple(fitting),
        spare_block_ids=tuple(sorted(running.blocks.spares)), ask=question.ask, num_taken=running.outbox.num_told,
    )  # fmt: skip


def _row(running: RunningSet, seq: Sequence) -> RunningSequence:
    return RunningSequence.unchecked(
        sid=seq.sid, epoch=seq.epoch, num_tokens=len(seq.token_ids), num_computed=seq.num_computed,
        block_ids=(), starved=seq.sid in running.starved, salt=b"",
    )  # fmt: skip
