"""Small running sets and what goes into them, for the worker's tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.gpu_worker.admission import Admission
from services.gpu_worker.batch import Answer, Chunk, Drafter, Drawn, EngineInfo, SampledToken, Sequence
from services.gpu_worker.composer import Budget
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.scripted_engine import ScriptedEngine, validate
from shared import scripted_vocab as vocab
from shared.protocol import SamplingParams
from shared.wire import Message
from shared.worker_protocol import Admit

BLOCK_SIZE = 4
SALT = bytes(32)
CAPACITY = Budget(max_num_batched_tokens=32, max_num_seqs=8, prefill_chunk=32)


def make_info(num_blocks: int = 16, max_model_len: int = 64) -> EngineInfo:
    return EngineInfo("scripted", vocab.VOCAB_SIZE, max_model_len, BLOCK_SIZE, num_blocks, "none")


def make_params(**fields: object) -> SamplingParams:
    return SamplingParams.model_validate({"max_tokens": 8, "temperature": 0.0, "seed": 1} | fields)


def make_sequence(
    num_prompt_tokens: int = 6, num_output_tokens: int = 0, *, sid: str = "r.0", epoch: int = 1, num_computed: int = 0,
    num_blocks: int = 8, first_block: int = 0, num_committed: int = 0, alone: bool = False, **params: object,
) -> Sequence:  # fmt: skip
    ids = [(7 * i + len(sid)) % 256 for i in range(num_prompt_tokens + num_output_tokens)]
    return Sequence(
        sid=sid, epoch=epoch, choice=0, params=make_params(**params), num_prompt_tokens=num_prompt_tokens,
        token_ids=ids, block_ids=list(range(first_block, first_block + num_blocks)), num_computed=num_computed,
        salt=SALT, alone=alone, num_committed=num_committed,
    )  # fmt: skip


def make_running(
    num_blocks: int = 16, max_model_len: int = 64, capacity: Budget = CAPACITY, drafter: Drafter | None = None
) -> RunningSet:
    return RunningSet(make_info(num_blocks, max_model_len), capacity, validate, drafter=drafter)


def make_engine(running: RunningSet, **options: object) -> ScriptedEngine:
    info = running.info
    return ScriptedEngine(
        num_blocks=info.num_blocks, block_size=info.block_size, max_model_len=info.max_model_len, **options
    )


def make_admission(
    prompt_ids: Seq[int], output_ids: Seq[int] = (), *, salt: bytes = SALT, **params: object
) -> Admission:
    made = make_params(**params)
    logprobs = None if made.logprobs is None else [(-1.0, ())] * len(output_ids)
    return Admission(made, list(prompt_ids), salt, list(output_ids), logprobs)


def make_admit(
    sid: str = "r.0", epoch: int = 1, block_ids: Seq[int] = (0, 1), cached_length: int = 0, pool_term: int = 0,
    alone: bool = False,
) -> Admit:  # fmt: skip
    return Admit(
        sid=sid, epoch=epoch, pool_term=pool_term, cached_length=cached_length, block_ids=tuple(block_ids), alone=alone
    )


def admit(running: RunningSet, prompt: Seq[int] | bytes, **fields: object) -> None:
    """Applies an Admit; fields of it, of the sampling parameters, or output_ids."""
    own = {
        k: fields.pop(k) for k in ("sid", "epoch", "block_ids", "cached_length", "pool_term", "alone") if k in fields
    }
    apply(running, make_admit(**own), admission=make_admission(list(prompt), **fields))  # type: ignore[arg-type]


def apply(
    running: RunningSet, message: Message, *, kind: str = "run", term: int = 1, admission: Admission | None = None
) -> None:
    running.apply(Change(kind, term, message, admission))


def step(running: RunningSet, engine: ScriptedEngine) -> list[Chunk]:
    """One step; the chunks it computed."""
    chunks = running.draft(running.prepare(max_prefill_tokens=64))
    if chunks:
        running.advance(chunks, engine.step(chunks))
    return chunks


def run_dry(running: RunningSet, engine: ScriptedEngine) -> int:
    """Steps until nobody can go on; how many steps."""
    num_steps = 0
    while step(running, engine):
        num_steps += 1
    return num_steps


def ended(running: RunningSet) -> list[tuple[str, int, str]]:
    """What the next report tells about ends; nothing is held back for the log."""
    return [(e.sid, e.epoch, e.reason) for e in running.outbox.carry(()).ended]


def drawn(*ids: int) -> list[Drawn]:
    return [(SampledToken(i),) for i in ids]


class Allows:
    """An answer that may be the same tokens whatever has come."""

    def __init__(self, mask: bytes | None) -> None:
        self._mask = mask

    def mask_after(self, output_ids: Seq[int]) -> bytes | None:
        return self._mask

    def allows(self, output_ids: Seq[int]) -> bool:
        return True

    def fork(self) -> Answer:
        return self
