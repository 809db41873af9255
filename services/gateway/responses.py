"""OpenAI's response objects, from deltas; plain dicts, since one is built for every event. *Pure.*

Per choice: for chat a first chunk with the role, then one chunk a delta, of which exactly the last has a finish
reason; then, if asked for, one chunk with usage and no choices. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal

from services.gateway.choice_stream import Delta
from services.gateway.logprob_format import TEXT_ALONE, Json, LogprobFormat, TokenDetails
from services.gateway.sse import dump
from services.gateway.tokenization import Tokenizer
from services.gateway.tool_formats import ID_CHARS
from services.gateway.tool_parser import CallPart


def usage(
    num_prompt_tokens: int, num_completion_tokens: int, cached_tokens: int, *, num_accepted: int = 0,
    num_rejected: int = 0, num_reasoning: int = 0,
) -> Json:  # fmt: skip
    """The prompt counts once a prompt, tokens once a choice, and so do those of its prediction."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning,
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
    prompt_ids: Sequence[int] = ()
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, CallPart] = field(default_factory=dict)
    logprobs: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sum_logprobs: float = 0.0
    num_logprobs: int = 0

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / max(1, self.num_logprobs)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self.texts.append(delta.text)
            self.sum_logprobs += sum(entry.logprob or 0.0 for entry in delta.logprobs)
            self.num_logprobs += len(delta.logprobs)
            self.reasoning.append(delta.reasoning)
            for part in delta.calls:
                old = self.calls.get(part.index, part)
                more = part.arguments if old is not part else ""
                self.calls[part.index] = replace(old, arguments=old.arguments + more)
            self.logprobs += self.builder.format.written(delta.prompt, delta.logprobs)
            self.prompt_logprobs += self.builder.format.prompt_written(delta.prompt)
            self.token_ids += delta.token_ids
            self.finish_reason = delta.finish_reason


class ResponseBuilder:
    """Builds everything of one HTTP response. with_logprobs: whether the client asked for them; details: what else it
    is told of tokens."""

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
        details: TokenDetails = TEXT_ALONE,
    ) -> None:
        self._chat = api == "chat"
        self.format = LogprobFormat(tokenizer, details, chat=self._chat, with_logprobs=with_logprobs)
        self._with_ids = details.with_ids
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

    def opening(self, index: int, prompt_ids: Sequence[int] = ()) -> Json | None:
        """The chunk before the first delta of a choice; completions have none."""
        if not self._chat:
            return None
        # an answer of calls has no content, and whether it will be one is not known yet
        content = {} if self._may_call else {"content": ""}
        opening = self._with_choice(index, {"delta": {"role": "assistant", **content}}, None, None)
        return opening | self._prompt_ids(prompt_ids)

    def _prompt_ids(self, prompt_ids: Sequence[int]) -> Json:
        return {"prompt_token_ids": list(prompt_ids)} if self._with_ids else {}

    def chunk(self, index: int, delta: Delta, prompt_ids: Sequence[int] | None = None) -> Json:
        """prompt_ids: where it is the choice's first, and there was no opening."""
        content: Json
        if self._chat:
            content = {"delta": self._chat_delta(index, delta)}
        else:
            content = {"text": delta.text}
        if self._with_ids:
            content["token_ids"] = list(delta.token_ids)
        if prompt_ids is not None:
            content |= self._prompt_ids(prompt_ids)
        logprobs = self.format.of_delta(delta.prompt, delta.logprobs, ended=delta.finish_reason is not None)
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
        prompt = self._prompt(choices[0]) if self._chat else b""
        return _fields(self._whole) + b"," + prompt + b'"choices":[' + written + b'],"usage":' + dump(usage) + b"}"

    def _prompt(self, result: ChoiceResult) -> bytes:
        """What is told of the prompt: fields, each with a comma."""
        ids = b"".join(
            b'"%s":%s,' % (name.encode(), dump(v)) for name, v in self._prompt_ids(result.prompt_ids).items()
        )
        return ids + self.format.prompt_whole(result.prompt_logprobs)

    def _with_choice(self, index: int, content: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._chunk, "choices": [choice]}

    def _choice(self, index: int, result: ChoiceResult) -> bytes:
        text = "".join(result.texts)
        content: Json = {"message": self._message(index, text, result)} if self._chat else {"text": text}
        if self._with_ids:
            content["token_ids"] = result.token_ids
        head, finish = _fields({"index": index, **content}), dump(result.finish_reason)
        prompt = b"" if self._chat else self._prompt(result)
        logprobs = self.format.whole(result.logprobs)
        return head + b"," + prompt + b'"logprobs":' + logprobs + b',"finish_reason":' + finish + b"}"

    def _message(self, index: int, text: str, result: ChoiceResult) -> Json:
        message: Json = {"role": "assistant", "content": text or (None if result.calls else "")}
        if thoughts := "".join(result.reasoning):
            message |= _reasoning(thoughts)
        if result.calls:
            message["tool_calls"] = [self._call(index, part, with_index=False) for part in result.calls.values()]
        return message


def _reasoning(text: str) -> Json:
    """Under the name that most clients read, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _fields(value: Json) -> bytes:
    """An object that is not closed yet."""
    return dump(value)[:-1]
