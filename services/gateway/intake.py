"""From the bytes of a body to what can be admitted, off the event loop where that takes long.

Owns the threads that tokenize. What is checked, and how, is in `request_parsing.py` and `preparation.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from services.gateway import json_reader, preparation
from services.gateway.dialect import Dialect, dialect_of
from services.gateway.errors import model_not_found
from services.gateway.fleet import Fleet
from services.gateway.forms import form_of, template_options
from services.gateway.grammar_pool import GrammarPool
from services.gateway.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
)
from services.gateway.preparation import PreparedPrompt
from services.gateway.request_parsing import parse
from services.gateway.template_pool import TemplatePool, encode_call, text_of
from services.gateway.tokenization import Tokenizer

INLINE_BODY_BYTES = 4096  # of a body that takes about a millisecond; longer ones are read in a thread
NUM_THREADS = 2

T = TypeVar("T")
R = TypeVar("R", bound=Request)
G = TypeVar("G", bound=ChatCompletionRequest | CompletionRequest)


class Intake:
    def __init__(
        self, tokenizer: Tokenizer, model: str, fleet: Fleet, max_choices: int, dialect: Dialect | None = None,
        strict: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self._strict = strict
        self._dialect = dialect or dialect_of(tokenizer)
        self._model = model
        self._fleet = fleet
        self._max_choices = max_choices
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="intake")
        self._grammars = GrammarPool(tokenizer)
        self._templates = TemplatePool(tokenizer.chat_template or "", tokenizer.template_tokens)

    async def start(self) -> None:
        """ChatTemplateError if the model has a chat template that cannot be used."""
        if self.tokenizer.chat_template is not None:
            await self._templates.start()

    async def close(self) -> None:
        await self._templates.close()
        await self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def generation(self, cls: type[G], body: bytes, owner: str) -> tuple[G, list[PreparedPrompt]]:
        """The checked request and its prompts. A wrong request is refused as such also when no worker is alive."""

        request, call = await self._run(body, lambda: self._read(cls, body))
        form = await self._run(body, lambda: form_of(request, self._dialect))
        if form.wanted is not None:
            form = replace(form, grammar=await self._grammars.compiled(form.wanted, owner))
        answer = await self._templates.render(call) if call else b""

        def prepare() -> list[PreparedPrompt]:
            return preparation.build_specs(
                request, self.tokenizer, self._fleet.limits(self._max_choices), draw_seed=lambda: secrets.randbits(64),
                now=datetime.now(UTC), fingerprint=self._fleet.fingerprint(),
                chat_text=text_of(answer) if answer else "", form=form,
            )  # fmt: skip

        return request, await self._run(body, prepare)

    async def digest(self, api: str, body: bytes) -> str:
        """Of a call as it is repeated: equal whatever the order of its fields, and whether it is streamed or not."""

        def take() -> str:
            value = json_reader.loads(body)
            assert isinstance(value, dict)
            same = {k: v for k, v in value.items() if k not in ("stream", "stream_options")}
            text = json.dumps([api, same], sort_keys=True, separators=(",", ":"))
            return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

        return await self._run(body, take)

    async def tokenize(self, body: bytes) -> tuple[TokenizeRequest, list[int]]:
        request, call = await self._run(body, lambda: self._read(TokenizeRequest, body))
        answer = await self._templates.render(call) if call else b""

        def prepare() -> list[int]:
            return preparation.tokenize(request, self.tokenizer, text_of(answer) if answer else "")

        return request, await self._run(body, prepare)

    async def detokenize(self, body: bytes) -> str:
        return await self._run(
            body, lambda: preparation.detokenize(self._parse(DetokenizeRequest, body), self.tokenizer)
        )

    def _read(self, cls: type[R], body: bytes) -> tuple[R, bytes]:
        """The checked request, and the call that renders its messages where it has any."""
        request = self._parse(cls, body)
        messages = preparation.conversation(request, self.tokenizer)
        if messages is None:
            return request, b""
        assert isinstance(request, ChatCompletionRequest | TokenizeRequest)
        return request, encode_call(messages, datetime.now(UTC), **template_options(request, self._dialect))

    def _parse(self, cls: type[R], body: bytes) -> R:
        request = parse(cls, json_reader.loads(body), strict=self._strict)
        if request.model not in (None, "", self._model):
            raise model_not_found()
        return request

    async def _run(self, body: bytes, work: Callable[[], T]) -> T:
        if len(body) <= INLINE_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
