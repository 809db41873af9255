"""What must be true of requests: the tokens each may have, and what Redis has of them from one look to the next.

`Wanted` computes a request's answer by itself, from the scripted vocabulary alone. `LogWatch` looks at every record
after every step of a test: a log only grows and says what is wanted, `done` is entered once, an outcome never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis

from shared import scripted_vocab as vocab
from shared.protocol import Outcome, RequestSpec, SamplingParams, TextParams, TokenChunk
from shared.wire import decode_as


@dataclass(frozen=True)
class Shape:
    """What the workers can hold."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def max_num_tokens(self) -> int:
        """Of a sequence, prompt and output."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass
class Wanted:
    """A request and its answer. stop_after: the gateway finds a stop string after so many tokens.

    may_be_cancelled: something has happened that excuses such an end. num_deaths: of workers, since it was submitted.
    """

    rid: str
    prompt: tuple[int, ...]
    num_choices: int
    sampling: SamplingParams
    shape: Shape
    stop_after: int | None = None
    may_be_cancelled: bool = False
    num_deaths: int = 0
    max_strikes: int = 2
    _answers: dict[int, tuple[list[int], str]] = field(default_factory=dict)

    @property
    def spec(self) -> RequestSpec:
        return RequestSpec(
            rid=self.rid, num_choices=self.num_choices, num_prompt_tokens=len(self.prompt), salt=bytes(32),
            sampling=self.sampling, text=TextParams(api="completions"),
        )  # fmt: skip

    @property
    def is_too_long(self) -> bool:
        return len(self.prompt) + (self.sampling.max_tokens > 0) > self.shape.max_num_tokens

    def answer(self, choice: int) -> tuple[list[int], str]:
        """Tokens and finish reason as an undisturbed worker draws them."""
        if choice not in self._answers:
            self._answers[choice] = self._compute(choice)
        return self._answers[choice]

    def _compute(self, choice: int) -> tuple[list[int], str]:
        params = self.sampling
        most = min(params.max_tokens, self.shape.max_num_tokens - len(self.prompt))
        seed, number = (params.seed, choice) if params.temperature > 0 else (0, 0)
        tokens = vocab.answer(self.prompt, max(0, most), seed, number)
        for i, token in enumerate(tokens):
            if i >= params.min_tokens and token in params.stop_token_ids:
                return tokens[: i + 1], "stop"
        return tokens, "length"

    def shown(self, choice: int) -> int:
        """How many tokens a client sees."""
        length = len(self.answer(choice)[0])
        return length if self.stop_after is None else min(length, self.stop_after)

    def check_outcome(self, choice: int, outcome: Outcome, log: list[int]) -> None:
        """AssertionError unless the sequence may have ended so."""
        tokens, reason = self.answer(choice)
        where = f"{self.rid}.{choice} ended with {outcome!r} after {len(log)} tokens of {len(tokens)}"
        if outcome.reason == "cancelled":
            assert self.may_be_cancelled, where
        elif outcome.reason == "error":
            excused = (
                (outcome.code in ("context_length_exceeded", "invalid_request") and self.is_too_long)
                or (outcome.code == "poison_request" and self.num_deaths > self.max_strikes)
            )  # fmt: skip
            assert excused, where
        elif self.stop_after is not None and outcome.num_tokens == self.stop_after and outcome.reason == "stop":
            assert len(log) >= self.stop_after, where
        else:
            assert not self.is_too_long, where
            assert (log, outcome.reason) == (tokens, reason) and outcome.num_tokens in (-1, len(tokens)), where


class LogWatch:
    """An own view of all records; `look` raises AssertionError when one went back or says what is not wanted."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.redis = client
        self.prefix = prefix
        self.logs: dict[str, list[int]] = {}
        self.outcomes: dict[str, bytes] = {}
        self.epochs: dict[str, int] = {}
        self._num_chunks: dict[str, int] = {}
        self._forgotten: set[str] = set()

    def forget(self, sids: list[str]) -> None:
        """Their records are gone, and must not come back."""
        self._forgotten |= set(sids)

    def look(self, requests: dict[str, Wanted]) -> None:
        sids = [f"{w.rid}.{i}" for w in requests.values() for i in range(w.num_choices)]
        pipe = self.redis.pipeline(transaction=True)
        for sid in sids:
            pipe.hgetall(f"{self.prefix}s:{sid}")
            pipe.lrange(f"{self.prefix}s:{sid}:log", 0, -1)
        replies = pipe.execute() if sids else []
        for i, sid in enumerate(sids):
            rid, _, choice = sid.rpartition(".")
            self._check(sid, requests[rid], int(choice), replies[2 * i], replies[2 * i + 1])

    def _check(self, sid: str, wanted: Wanted, choice: int, record: dict[bytes, bytes], log: list[bytes]) -> None:
        if not record or sid in self._forgotten:
            assert not record or sid not in self._forgotten, f"{sid} is back: {record}"
            assert sid not in self.epochs or sid in self._forgotten, f"{sid} has lost its record"
            return
        epoch, state = int(record[b"epoch"]), record[b"state"].decode()
        assert epoch >= self.epochs.get(sid, 0), f"{sid}: the epoch went back"
        self.epochs[sid] = epoch
        known = self._num_chunks.get(sid, 0)
        assert len(log) >= known, f"{sid}: the log has lost chunks"
        tokens = self.logs.setdefault(sid, [])
        for data in log[known:]:
            self._append(sid, tokens, decode_as(TokenChunk, data), wanted.sampling)
        self._num_chunks[sid] = len(log)
        answer, _ = wanted.answer(choice)
        assert tokens == answer[: len(tokens)], f"{sid}: {tokens} in the log, wanted {answer}"
        assert int(record[b"num_tokens"]) == len(tokens), f"{sid}: the record counts other tokens than the log has"
        self._check_state(sid, wanted, choice, state, record, tokens)

    def _append(self, sid: str, tokens: list[int], chunk: TokenChunk, params: SamplingParams) -> None:
        assert chunk.first == len(tokens), f"{sid}: a chunk begins at {chunk.first}, the log has {len(tokens)}"
        tokens += chunk.ids
        assert (chunk.logprobs is None) == (params.logprobs is None), f"{sid}: log-probabilities"
        for token, (logprob, top) in zip(chunk.ids, chunk.logprobs or (), strict=False):
            assert logprob == -0.5 and [t for t, _ in top][:1] in ([token], []), f"{sid}: log-probabilities"

    def _check_state(
        self, sid: str, wanted: Wanted, choice: int, state: str, record: dict[bytes, bytes], tokens: list[int]
    ) -> None:
        known = self.outcomes.get(sid)
        if known is not None:
            assert state == "done" and record[b"outcome"] == known, f"{sid} was over and has another end now"
        elif state == "done":
            wanted.check_outcome(choice, decode_as(Outcome, record[b"outcome"]), tokens)
            self.outcomes[sid] = record[b"outcome"]
        else:
            assert state in ("queued", "placed"), state

    def fields_of(self, sid: str) -> dict[str, Any]:
        record = self.redis.hgetall(f"{self.prefix}s:{sid}")
        return {k.decode(): v for k, v in record.items()}
