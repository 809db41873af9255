"""OpenAI's response objects, from deltas; plain dicts, since one is built for every event. *Pure.*

Per choice: for chat a first chunk with the role, then one chunk a delta, of which exactly the last has a finish
reason; then, if asked for, one chunk with usage and no choices. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal

from services.gateway.choice_stream import Delta, TokenLogprob
from services.gateway.sse import dump
from services.gateway.tokenization import Tokenizer
from services.gateway.tool_formats import ID_CHARS
from services.gateway.tool_parser import CallPart

LOGPROB_FLOOR = -9999.0  # JSON has no infinity; vLLM's and OpenAI's value for "impossible"

Json = dict[str, Any]


def usage(
    num_prompt_tokens: int, num_completion_tokens: int, cached_tokens: int, *, num_accepted: int = 0,
    num_rejected: int = 0,
) -> Json:  # fmt: skip
    """The prompt counts once a prompt, tokens once a choice, and so do those of its prediction."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_rejected,
        },
    }


@dataclass(slots=True)
class ChoiceResult:
    """A choice's deltas put together, for an answer that is not streamed.

    Log-probabilities are kept as the JSON that they become: as objects they take ten times the memory, and writing
    thousands of them at the end would take seconds in which nobody else is served.
    """

    builder: ResponseBuilder
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, CallPart] = field(default_factory=dict)
    logprobs: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    sum_logprobs: float = 0.0
    num_logprobs: int = 0

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / max(1, self.num_logprobs)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self.texts.append(delta.text)
            self.sum_logprobs += sum(entry.logprob for entry in delta.logprobs)
            self.num_logprobs += len(delta.logprobs)
            self.reasoning.append(delta.reasoning)
            for part in delta.calls:
                old = self.calls.get(part.index, part)
                more = part.arguments if old is not part else ""
                self.calls[part.index] = replace(old, arguments=old.arguments + more)
            self.logprobs += self.builder.written(delta.logprobs)
            self.finish_reason = delta.finish_reason


class ResponseBuilder:
    """Builds everything of one HTTP response. with_logprobs: whether the client asked for them."""

    def __init__(
        self,
        api: Literal["chat", "completions"],
        tokenizer: Tokenizer,
        *,
        id: str,
        model: str,
        created: int,
        with_logprobs: bool = False,
        include_usage: bool = False,
        system_fingerprint: str | None = None,
        call_id_chars: int = ID_CHARS,
        may_call: bool = False,
    ) -> None:
        self._chat = api == "chat"
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._call_id_chars = call_id_chars
        self._may_call = may_call
        self._whole: Json = {
            "id": id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": system_fingerprint,
        }
        self._chunk = self._whole | {"object": "chat.completion.chunk" if self._chat else "text_completion"}
        if include_usage:
            self._chunk["usage"] = None  # as OpenAI: named in every chunk, given in the last

    def opening(self, index: int) -> Json | None:
        """The chunk before the first delta of a choice; completions have none."""
        if not self._chat:
            return None
        # an answer of calls has no content, and whether it will be one is not known yet
        content = {} if self._may_call else {"content": ""}
        return self._with_choice(index, {"delta": {"role": "assistant", **content}}, None, None)

    def chunk(self, index: int, delta: Delta) -> Json:
        content: Json
        if self._chat:
            content = {"delta": self._chat_delta(index, delta)}
        else:
            content = {"text": delta.text}
        is_said = bool(delta.logprobs) or (self._with_logprobs and delta.finish_reason is not None)
        logprobs = self._logprobs(delta.logprobs) if is_said else None
        return self._with_choice(index, content, logprobs, delta.finish_reason)

    def _chat_delta(self, index: int, delta: Delta) -> Json:
        # what may have been calls and is nothing is an empty text, as in a whole answer
        parts: Json = {"content": delta.text} if delta.text or (self._may_call and delta.is_empty) else {}
        if delta.reasoning:
            parts |= _reasoning(delta.reasoning)
        if delta.calls:
            parts["tool_calls"] = [self._call(index, part, with_index=True) for part in delta.calls]
        return parts

    def _call(self, index: int, part: CallPart, *, with_index: bool) -> Json:
        """A call, or what is new of it. Its id follows from the answer's, so that any gateway gives the same."""
        function = {"arguments": part.arguments}
        if not part.name:
            return {"index": part.index, "function": function}
        digest = sha256(f"{self._whole['id']}:{index}:{part.index}".encode()).hexdigest()[: self._call_id_chars]
        id = digest if self._call_id_chars < ID_CHARS else f"call_{digest}"
        call = {"id": id, "type": "function", "function": {"name": part.name} | function}
        return {"index": part.index} | call if with_index else call

    def usage_chunk(self, usage: Json) -> Json:
        return {**self._chunk, "choices": [], "usage": usage}

    def whole(self, choices: Sequence[ChoiceResult], usage: Json) -> bytes:
        """The body of an answer that is not streamed."""
        written = b",".join([self._choice(i, c) for i, c in enumerate(choices)])
        return _fields(self._whole) + b',"choices":[' + written + b'],"usage":' + dump(usage) + b"}"

    def written(self, entries: Sequence[TokenLogprob]) -> list[bytes]:
        """Log-probabilities as they stand in `whole`: an object each for chat, a value in each of four lists else."""
        if not self._with_logprobs:
            return []
        if self._chat:
            return [dump(self._chat_entry(entry)) for entry in entries]
        lists = self._logprobs(entries).values()
        return [dump(value) for row in zip(*lists, strict=True) for value in row]

    def _with_choice(self, index: int, content: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._chunk, "choices": [choice]}

    def _choice(self, index: int, result: ChoiceResult) -> bytes:
        text = "".join(result.texts)
        content: Json = {"message": self._message(index, text, result)} if self._chat else {"text": text}
        head, finish = _fields({"index": index, **content}), dump(result.finish_reason)
        return head + b',"logprobs":' + self._written_whole(result.logprobs) + b',"finish_reason":' + finish + b"}"

    def _message(self, index: int, text: str, result: ChoiceResult) -> Json:
        message: Json = {"role": "assistant", "content": text or (None if result.calls else "")}
        if thoughts := "".join(result.reasoning):
            message |= _reasoning(thoughts)
        if result.calls:
            message["tool_calls"] = [self._call(index, part, with_index=False) for part in result.calls.values()]
        return message

    def _written_whole(self, logprobs: list[bytes]) -> bytes:
        if not self._with_logprobs:
            return b"null"
        if self._chat:
            return b'{"content":[' + b",".join(logprobs) + b"]}"
        names = list(self._logprobs(()))
        lists = [
            b'"%s":[' % name.encode() + b",".join(logprobs[i :: len(names)]) + b"]" for i, name in enumerate(names)
        ]
        return b"{" + b",".join(lists) + b"}"

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        if self._chat:
            return {"content": [self._chat_entry(e) for e in entries]}
        return {
            "tokens": [self._tokenizer.token_text(e.token_id) for e in entries],
            "token_logprobs": [_clamped(e.logprob) for e in entries],
            "top_logprobs": [self._alternatives(e) for e in entries],
            "text_offset": [e.offset for e in entries],
        }

    def _chat_entry(self, entry: TokenLogprob) -> Json:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": _clamped(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """By text, the drawn token among them; of two tokens with one text the likelier stays."""
        best: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            best.setdefault(self._tokenizer.token_text(token_id), _clamped(logprob))
        return best


def _reasoning(text: str) -> Json:
    """Under the name that most clients read, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _fields(value: Json) -> bytes:
    """An object that is not closed yet."""
    return dump(value)[:-1]


def _clamped(logprob: float) -> float:
    """Within [LOGPROB_FLOOR, 0]; also for NaN, which compares with nothing."""
    return min(logprob, 0.0) if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR
