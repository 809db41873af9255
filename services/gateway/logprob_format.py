"""Log-probabilities as clients read them: OpenAI's two shapes, and vLLM's of a prompt's tokens. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.choice_stream import TokenLogprob
from services.gateway.sse import dump
from services.gateway.tokenization import Tokenizer

LOGPROB_FLOOR = -9999.0  # JSON has no infinity; vLLM's and OpenAI's value for "impossible"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """What a client is told of tokens beside their text. num_echoed: alternatives to a token of an echoed prompt, in
    `logprobs`; num_prompt: those in `prompt_logprobs`; None: neither. as_ids: tokens have the name `token_id:5` there.
    with_ids: their ids come along."""

    num_echoed: int | None = None
    num_prompt: int | None = None
    as_ids: bool = False
    with_ids: bool = False


TEXT_ALONE = TokenDetails()


class LogprobFormat:
    """with_logprobs: whether the client asked for `logprobs`."""

    def __init__(self, tokenizer: Tokenizer, details: TokenDetails, *, chat: bool, with_logprobs: bool) -> None:
        self.details = details
        self._tokenizer = tokenizer
        self._chat = chat
        self._with_logprobs = with_logprobs

    # --- `logprobs` --------------------------------------------------------------------------------------------------

    def of_delta(
        self, prompt: Sequence[TokenLogprob], entries: Sequence[TokenLogprob], *, ended: bool = False
    ) -> Json | None:
        """In an event; None where it has none, unless it is the last."""
        entries = [*self._echoed(prompt), *entries]
        return self._lists(entries) if entries or (ended and self._with_logprobs) else None

    def written(self, prompt: Sequence[TokenLogprob], entries: Sequence[TokenLogprob]) -> list[bytes]:
        """As they stand in `whole`: an object each for chat, a value in each of four lists else."""
        if not self._with_logprobs:
            return []
        entries = [*self._echoed(prompt), *entries]
        if self._chat:
            return [dump(self._chat_entry(entry)) for entry in entries]
        lists = self._lists(entries).values()
        return [dump(value) for row in zip(*lists, strict=True) for value in row]

    def whole(self, written: list[bytes]) -> bytes:
        if not self._with_logprobs:
            return b"null"
        if self._chat:
            return b'{"content":[' + b",".join(written) + b"]}"
        names = list(self._lists(()))
        lists = [b'"%s":[' % name.encode() + b",".join(written[i :: len(names)]) + b"]" for i, name in enumerate(names)]
        return b"{" + b",".join(lists) + b"}"

    def _echoed(self, prompt: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        num = self.details.num_echoed
        if num is None:
            return ()
        return [TokenLogprob(e.token_id, e.logprob, e.top[:num], e.offset) for e in prompt]

    def _lists(self, entries: Sequence[TokenLogprob]) -> Json:
        if self._chat:
            return {"content": [self._chat_entry(e) for e in entries]}
        return {
            "tokens": [self._name(e.token_id) for e in entries],
            "token_logprobs": [None if e.logprob is None else _clamped(e.logprob) for e in entries],
            "top_logprobs": [self._alternatives(e) for e in entries],
            "text_offset": [e.offset for e in entries],
        }

    def _chat_entry(self, entry: TokenLogprob) -> Json:
        assert entry.logprob is not None
        top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._name(token_id),
            "logprob": _clamped(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float] | None:
        """By text, the token itself among them; of two tokens with one text the likelier stays."""
        if entry.logprob is None:
            return None
        best: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            best.setdefault(self._name(token_id), _clamped(logprob))
        return best

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.details.as_ids else self._tokenizer.token_text(token_id)

    # --- `prompt_logprobs` -------------------------------------------------------------------------------------------

    def prompt_written(self, prompt: Sequence[TokenLogprob]) -> list[bytes]:
        """As they stand in `prompt_whole`."""
        num = self.details.num_prompt
        return [] if num is None else [dump(self._prompt_entry(entry, num)) for entry in prompt]

    def prompt_whole(self, written: list[bytes]) -> bytes:
        """A field and a comma, or nothing."""
        return b"" if self.details.num_prompt is None else b'"prompt_logprobs":[' + b",".join(written) + b"],"

    def _prompt_entry(self, entry: TokenLogprob, num_top: int) -> Json | None:
        if entry.logprob is None:
            return None
        top = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)}
        return {
            str(token_id): {
                "logprob": _clamped(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, (logprob, rank) in ({entry.token_id: (entry.logprob, entry.rank)} | top).items()
        }  # fmt: skip


def _clamped(logprob: float) -> float:
    """Within [LOGPROB_FLOOR, 0]; also for NaN, which compares with nothing."""
    return min(logprob, 0.0) if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR
