"""An engine without a model, for tests of everything around it: the next token is a function of the ids.

What it draws, and the prompts that make it crash, hang or raise, are in `shared/scripted_vocab.py`. Instead of keys and
values its pool keeps which tokens were written where, and after which prefix; every step checks that all earlier
tokens of a sequence are where its block table says (`KVCorruption` if not), so a wrong table, a block with two
writers or a false cache hit shows in any test that runs on it. Needs no torch.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from services.gpu_worker.batch import Chunk, Drawn, EngineInfo, SampledToken, Sequence, mask_after
from services.gpu_worker.speculative.draft import ROOT, chain
from shared import scripted_vocab as vocab
from shared.protocol import SamplingParams

CRASH_STATUS = 86


class KVCorruption(Exception):
    """The pool does not hold what the sequence's block table says."""


class ScriptedFailure(Exception):
    """The prompt asked for it."""


@dataclass(frozen=True, slots=True)
class _Written:
    """One block: the tokens in it, from its first slot on, and a hash of all tokens before the block."""

    prefix: int
    ids: list[int]


def _hang() -> None:
    threading.Event().wait()


class ScriptedEngine:
    """step_s: duration of a step; token_s: what each prompt token or draft adds to it. crash_on, hang_on, raise_on: the
    same as the markers with k = 0, for prompts that contain these bytes."""

    def __init__(
        self, *, num_blocks: int, block_size: int = 16, max_model_len: int = 4096, step_s: float = 0.0,
        token_s: float = 0.0, crash_on: bytes = b"", hang_on: bytes = b"", raise_on: bytes = b"",
        sleep: Callable[[float], None] = time.sleep, crash: Callable[[int], None] = os._exit,
        hang: Callable[[], None] = _hang,
    ) -> None:  # fmt: skip
        self.info = EngineInfo(
            variant="scripted", vocab_size=vocab.VOCAB_SIZE, max_model_len=max_model_len, block_size=block_size,
            num_blocks=num_blocks, device="none",
        )  # fmt: skip
        self._step_s = step_s
        self._token_s = token_s
        self._sleep = sleep
        self._faults: list[tuple[int, bytes, Callable[[], None]]] = [
            (vocab.CRASH, crash_on, lambda: crash(CRASH_STATUS)),
            (vocab.HANG, hang_on, hang),
            (vocab.RAISE, raise_on, _raise),
        ]
        self._pool: dict[int, _Written] = {}

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        num_tokens = sum(c.num_rows - (c.sample and c.count == 1) for c in chunks)
        seconds = self._step_s + self._token_s * num_tokens
        if seconds > 0:
            self._sleep(seconds)
        self._meet_memory(chunks)
        for chunk in chunks:
            self._write(chunk)
        drawn = [(*self._scores(c), *(self._draws(c) if c.sample else ())) for c in chunks]
        for chunk, tokens in zip(chunks, drawn, strict=True):
            if not chunk.draft.is_chain:  # what is right moves to where it would stand without the rest
                self._write(replace(chunk, draft=chain([t.token_id for t in tokens[len(chunk.scored) : -1]])))
        return drawn

    def _scores(self, chunk: Chunk) -> Iterator[SampledToken]:
        seq, num_top = chunk.seq, chunk.seq.params.prompt_logprobs or 0
        for number in chunk.scored:
            self._meet_faults(seq)
            yield _scored(seq.token_ids[: number + 2], num_top)

    def _draws(self, chunk: Chunk) -> Iterator[SampledToken]:
        place, seq = ROOT, chunk.seq
        while True:
            self._meet_faults(seq)
            token = self._draw(seq)
            yield token
            place = chunk.draft.child(place, token.token_id)
            if place == ROOT:
                return
            seq = replace(seq, token_ids=[*seq.token_ids, token.token_id])

    def _write(self, chunk: Chunk) -> None:
        seq, size, end = chunk.seq, self.info.block_size, chunk.start + chunk.num_rows
        token_ids = [*seq.token_ids, *chunk.draft.ids]
        prefix = 0
        for index in range(math.ceil(end / size)):
            first = index * size
            block_id, ids = seq.block_ids[index], token_ids[first : min(first + size, end)]
            if not 0 <= block_id < self.info.num_blocks:
                raise KVCorruption(f"block {block_id} is not in the pool")
            num_earlier = min(max(chunk.start - first, 0), size)
            if num_earlier:
                self._check(seq, index, prefix, ids[:num_earlier])
            if num_earlier < len(ids) and not self._holds(block_id, prefix, ids):
                self._pool[block_id] = _Written(prefix, ids)
            prefix = hash((prefix, *ids))

    def _check(self, seq: Sequence, index: int, prefix: int, ids: list[int]) -> None:
        if not self._holds(seq.block_ids[index], prefix, ids):
            raise KVCorruption(f"block {seq.block_ids[index]} is not block {index} of {seq.sid}")

    def _holds(self, block_id: int, prefix: int, ids: list[int]) -> bool:
        """These, and perhaps more behind them, which writing the same again leaves as it is."""
        written = self._pool.get(block_id)
        return written is not None and written.prefix == prefix and written.ids[: len(ids)] == ids

    def _meet_memory(self, chunks: Seq[Chunk]) -> None:
        num_tokens = sum(c.num_rows for c in chunks)
        for seq in (c.seq for c in chunks):
            most = vocab.marker_at(seq.token_ids, seq.num_prompt_tokens, vocab.OOM)
            if 0 <= most < num_tokens:
                raise MemoryError("the prompt asked for it")

    def _meet_faults(self, seq: Sequence) -> None:
        for marker, text, act in self._faults:
            at = vocab.marker_at(seq.token_ids, seq.num_prompt_tokens, marker)
            if 0 <= at <= seq.num_output_tokens or (text and text in _prompt_bytes(seq)):
                act()

    def _draw(self, seq: Sequence) -> SampledToken:
        params = seq.params
        seed, choice = (params.seed, seq.choice) if params.temperature > 0 else (0, 0)
        token = vocab.next_token(seq.token_ids, seq.num_prompt_tokens, seed, choice)
        if seq.answer is not None:
            token = _next_allowed(token, mask_after(seq.sid, seq.answer, seq.token_ids[seq.num_prompt_tokens :]))
        if params.logprobs is None:
            return SampledToken(token)
        rest = [(token + i) % vocab.VOCAB_SIZE for i in range(1, params.logprobs)]
        ranked = [token, *rest][: params.logprobs]
        return SampledToken(token, -0.5, tuple((t, -0.5 - rank) for rank, t in enumerate(ranked)))


def _scored(ids: Seq[int], num_top: int) -> SampledToken:
    """The last of them: by its rank it is likely, and its neighbours by id are the tokens around it."""
    rank, token_id = vocab.rank(ids), ids[-1]
    top = ((token_id + i - rank) % vocab.VOCAB_SIZE for i in range(1, num_top + 1))
    return SampledToken(token_id, -0.25 * rank, tuple((t, -0.25 * i) for i, t in enumerate(top, 1)), rank)


def validate(params: SamplingParams, vocab_size: int) -> str | None:
    """What is wrong with the parameters, or None."""
    if any(not 0 <= t < vocab_size for t in params.stop_token_ids):
        return "stop_token_ids: outside the vocabulary"
    if any(not 0 <= t < vocab_size for t in params.logit_bias):
        return "logit_bias: outside the vocabulary"
    return None


def _next_allowed(token: int, mask: bytes | None) -> int:
    """The token, or the next one that may be drawn, by id, the first following the last."""
    if mask is None:
        return token
    ids = ((token + i) % vocab.VOCAB_SIZE for i in range(vocab.VOCAB_SIZE))
    return next(i for i in ids if mask[i // 8] >> i % 8 & 1)


def _raise() -> None:
    raise ScriptedFailure("the prompt asked for it")


def _prompt_bytes(seq: Sequence) -> bytes:
    return bytes(t for t in seq.token_ids[: seq.num_prompt_tokens] if t < vocab.NUM_BYTES)
