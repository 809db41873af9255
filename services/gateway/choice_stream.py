"""Turns the committed tokens of one choice into what its client sees. *Pure.*

What a client sees is a function of the request and the first p committed tokens alone: text, the end, the reason,
the count. Where log-probabilities of the prompt are asked for, those come first, at positions below 0. It does not
depend on how the tokens were cut into chunks nor on which gateway asks, so a stream can be taken up at any position by
another one. Tokens after the end are neither shown nor counted. Knows nothing of HTTP or of OpenAI's shapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway import answer_parts
from services.gateway.answer_parts import AnswerParts
from services.gateway.echo import echo_pieces
from services.gateway.prediction import PredictionMatch
from services.gateway.tokenization import Tokenizer
from services.gateway.tool_parser import CallPart
from services.gateway.visible_text import VisibleText
from shared.protocol import SamplingParams, TextParams, TokenChunk, log_start


class GapError(ValueError):
    """A chunk does not follow on what was fed: read the log from `expected` on."""

    def __init__(self, expected: int, first: int) -> None:
        super().__init__(f"the chunk begins at token {first}, expected {expected}")
        self.expected = expected


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the best alternatives; offset is where its text begins in the choice's text. rank:
    only of the prompt's tokens, of which the first has no log-probability."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new for the client after `position` tokens. The one with a finish_reason is the choice's last.

    text: completions' text, a chat's content; reasoning and calls: what else was found in a chat's answer.
    is_empty: the choice has ended with neither text nor calls. prompt: what is known of the prompt's tokens, where that
    was asked for. token_ids: those that are new, where they were."""

    text: str
    position: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    is_empty: bool = False
    prompt: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


class ChoiceStream:
    """Feed chunks in order; what overlaps with what was fed is dropped, a gap is a GapError.

    position is where it is in the log; num_tokens counts the tokens up to and including the one that ended the choice,
    cached_tokens the prompt tokens that were not computed. resume_at: the position of the last event that the client
    already has (None: nothing yet), resume_finished: whether that event was the choice's end; what the client has is
    computed and not returned.
    """

    def __init__(
        self,
        text: TextParams,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        resume_at: int | None = None,
        resume_finished: bool = False,
        prediction: Sequence[int] = (),
    ) -> None:
        """prompt_ids are needed only for echo and log-probabilities of the prompt. prediction: token ids that are
        expected."""
        self.position = log_start(sampling, len(prompt_ids))
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.prediction = PredictionMatch(prediction)
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._resume_at = resume_at
        self._resume_finished = resume_finished
        self._visible = VisibleText(
            tokenizer,
            stops=text.stop,
            include_stop=text.include_stop_str_in_output,
            skip_special_tokens=text.skip_special_tokens,
            marks=answer_parts.marks(text),
        )
        self._parts = AnswerParts(text)
        self._first = tuple(prompt_ids[:1]) if sampling.prompt_logprobs is not None else ()
        self._echo = echo_pieces(tokenizer, prompt_ids) if text.echo else []
        self._num_echoed = 0  # characters
        self._token_ends: list[int] = []  # characters up to each token, where thoughts are told apart
        self._keeps_ends = bool(text.reasoning_format)
        self._echoed: list[str] = []
        self._prompt: list[TokenLogprob] = []
        self._logprobs: list[TokenLogprob] = []
        self._ids: list[int] | None = [] if text.return_token_ids else None

    @property
    def num_tokens(self) -> int:
        return max(0, self.position)

    @property
    def num_reasoning_tokens(self) -> int:
        """Those in which a character of thoughts, or of the marks around them, begins."""
        num_chars = self._parts.num_reasoning_chars
        return min(len(self._token_ends), bisect_left(self._token_ends, num_chars) + 1) if num_chars else 0

    def open(self) -> list[Delta]:
        """What the client sees before anything is committed: the echoed prompt, but what log-probabilities are to come
        with, and the end if there is nothing to compute."""
        if self._sampling.max_tokens == 0 and self.position == 0:
            self.finish_reason = "length"
        for token_id in self._first:
            self._prompt.append(TokenLogprob(token_id, None, (), 0))
        self._echo_to(self.position)
        if self._resume_at is not None:
            self._drop()
            return []
        if not (self._echoed or self._prompt or self.finish_reason):
            return []
        text, prompt = self._pop_prompt()
        return [Delta(text, self.position, finish_reason=self.finish_reason, prompt=prompt)]

    def _echo_to(self, position: int) -> None:
        """The prompt's text up to there."""
        pieces = self._echo[: len(self._echo) + position]
        del self._echo[: len(pieces)]
        self._echoed += pieces
        self._num_echoed += sum(map(len, pieces))

    def _pop_prompt(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        popped = "".join(self._echoed), tuple(self._prompt)
        self._echoed.clear()
        self._prompt.clear()
        return popped

    def feed(self, chunk: TokenChunk) -> list[Delta]:
        """At most one delta; none while all new text is held back, and none after the end."""
        if self.finish_reason is not None:
            return []
        if chunk.first > self.position:
            raise GapError(self.position, chunk.first)
        if chunk.first == 0 and chunk.ids:
            self.cached_tokens = chunk.cached_tokens
        num_left = chunk.first + len(chunk.ids) - self.position
        if num_left < 0:
            return []
        for i in range(len(chunk.ids) - num_left, len(chunk.ids)):
            num_left -= 1
            if self.position < 0:
                ended = self._take_prompt(chunk, i)
            else:
                ended = self._take(chunk, i, closes=bool(chunk.finish) and not num_left)
            if self.position == self._resume_at:
                self._drop()
            if ended:
                return self._emit()
        if chunk.finish:
            return self.close(chunk.finish)
        return self._emit()

    def close(self, finish_reason: str) -> list[Delta]:
        """End the choice for a reason that does not stand in its tokens; what was held back is shown."""
        if self.finish_reason is not None:
            return []
        self.finish_reason = finish_reason
        self._visible.close()
        return self._emit(ended_without_token=True)

    def _take_prompt(self, chunk: TokenChunk, i: int) -> bool:
        """Add what the chunk has of the prompt's token i; it ends nothing."""
        assert chunk.logprobs is not None and chunk.ranks is not None
        logprob, top = chunk.logprobs[i]
        self._prompt.append(TokenLogprob(chunk.ids[i], logprob, top, self._num_echoed, chunk.ranks[i]))
        self.position += 1
        self._echo_to(self.position)
        return False

    def _take(self, chunk: TokenChunk, i: int, closes: bool) -> bool:
        """Add the chunk's token i; True if the choice ends with it. closes: the worker ended the sequence with it."""
        token_id = chunk.ids[i]
        self.position += 1
        if self._ids is not None:
            self._ids.append(token_id)
        self.prediction.push(token_id)
        may_stop = self.num_tokens > self._sampling.min_tokens
        is_stop_id = token_id in self._stop_ids and (may_stop or (closes and chunk.finish == "stop"))
        last = is_stop_id or closes or self.num_tokens >= self._sampling.max_tokens
        if chunk.logprobs is not None:
            logprob, top = chunk.logprobs[i]
            offset = self._num_echoed + self._visible.num_chars
            self._logprobs.append(TokenLogprob(token_id, logprob, top, offset))
        if self._visible.push(token_id, may_stop=may_stop, hidden=is_stop_id, last=last) or is_stop_id:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = chunk.finish if closes else "length"
        if self._keeps_ends:
            self._token_ends.append(self._visible.num_chars)
        return self.finish_reason is not None

    def _emit(self, *, ended_without_token: bool = False) -> list[Delta]:
        if self._client_has_it(ended_without_token):
            self._drop()
            return []
        parts = self._parts.push(self._visible.take(), last=self.finish_reason is not None)
        text, prompt = self._pop_prompt()
        text += parts.content
        logprobs, ids = self._pop_tokens()
        if not (text or parts.reasoning or parts.calls or logprobs or prompt or ids or self.finish_reason):
            return []
        shown = "tool_calls" if self.finish_reason == "stop" and self._parts.has_calls else self.finish_reason
        is_empty = self.finish_reason is not None and not (self._parts.has_content or self._parts.has_calls)
        return [Delta(text, self.position, logprobs, shown, parts.reasoning, parts.calls, is_empty, prompt, ids)]

    def _client_has_it(self, ended_without_token: bool) -> bool:
        """An end after the token of the client's last event is news to it, unless that event was the end."""
        if self._resume_at is None:
            return False
        if self._resume_finished or self.position < self._resume_at:
            return True
        return self.position == self._resume_at and not ended_without_token

    def _drop(self) -> None:
        """The client has everything up to here."""
        self._parts.push(self._visible.take())
        self._pop_prompt()
        self._pop_tokens()

    def _pop_tokens(self) -> tuple[tuple[TokenLogprob, ...], tuple[int, ...]]:
        popped = tuple(self._logprobs), tuple(self._ids or ())
        self._logprobs.clear()
        if self._ids:
            self._ids.clear()
        return popped
