"""The two routes that generate: chat and completions, streamed or whole.

Owns how an answer goes out: when it begins, what ends it, what a client that reads slowly costs. What is in it comes
from `generation.py`, how it looks from `responses.py` and `sse.py`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web

from services.gateway import sse
from services.gateway.auth import OWNER
from services.gateway.body import read_body
from services.gateway.choice_stream import Delta
from services.gateway.errors import ApiError, error_body
from services.gateway.generation import Caller, Generation
from services.gateway.http_server import json_response
from services.gateway.intake import Intake
from services.gateway.middleware import CLIENT_ID, RID
from services.gateway.open_request import Moved
from services.gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.responses import ChoiceResult, Json, ResponseBuilder, usage
from services.gateway.state import GatewayState
from shared.block_keys import request_salt

log = logging.getLogger(__name__)

STALL_S = 60.0  # a client that takes nothing for so long is cut; until then only its own response waits
UNBOUNDED_WRITE_BYTES = 32 * 1024  # half of what asyncio buffers before it makes a writer wait
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks a proxy to pass events on as they come
}


@dataclass(frozen=True, slots=True)
class CompletionRoutes:
    state: GatewayState
    intake: Intake

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, ChatCompletionRequest)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, CompletionRequest)

    async def _answer(
        self, http: web.Request, cls: type[ChatCompletionRequest] | type[CompletionRequest]
    ) -> web.StreamResponse:
        started = asyncio.get_running_loop().time()
        body = await read_body(http, self.state.settings.max_body_bytes)
        self.state.check_open()
        request, prompts = await self.intake.generation(cls, body)
        owner = http[OWNER]
        salt = request_salt(self.state.secret, owner, request.cache_salt or "")
        try:
            async with Generation(
                self.state.inflight, self.state.metrics, self.intake.tokenizer, prompts, rid=http[RID],
                caller=Caller(owner, salt, http[CLIENT_ID]), timeout_s=self.state.settings.request_timeout_s,
                started=started,
            ) as generation:  # fmt: skip
                answer = Answer(generation, self._builder(generation, request))
                return await (answer.stream(http) if request.stream else answer.whole())
        except asyncio.CancelledError:
            self.state.metrics.disconnected.inc()
            raise
        except Moved:
            raise ConnectionError("another gateway answers this request") from None

    def _builder(self, generation: Generation, request: ChatCompletionRequest | CompletionRequest) -> ResponseBuilder:
        text, sampling = generation.prompts[0].text, generation.prompts[0].sampling
        kind = "chatcmpl" if text.api == "chat" else "cmpl"
        return ResponseBuilder(
            text.api, self.intake.tokenizer, id=f"{kind}-{generation.rid}", model=self.state.model,
            created=text.created, with_logprobs=sampling.logprobs is not None, include_usage=text.include_usage,
            system_fingerprint=self.state.fleet.fingerprint(),
        )  # fmt: skip


class Answer:
    """One response on its way out."""

    def __init__(self, generation: Generation, builder: ResponseBuilder) -> None:
        self._generation = generation
        self._builder = builder
        self._places = [sse.Place(0)] * len(generation.choices)
        self._opened = [False] * len(generation.choices)

    async def whole(self) -> web.Response:
        results = [ChoiceResult() for _ in self._generation.choices]
        while self._generation.is_running:
            for index, delta in await self._generation.next():
                results[index].add([delta])
        return json_response(self._builder.whole(results, self._usage()))

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """Begins with the first event, so that what fails before it is an ordinary error; what fails later is one
        error event, and no `[DONE]`."""
        response: web.StreamResponse | None = None
        try:
            while self._generation.is_running:
                deltas = await self._generation.next()
                if response is None:
                    response = web.StreamResponse(headers=STREAM_HEADERS)
                    await response.prepare(http)
                await _write(http, response, self._events(deltas) if deltas else sse.KEEP_ALIVE)
            assert response is not None  # a request has at least one choice, and a choice at least one delta
            await _write(http, response, self._ending())
        except ApiError as e:
            if response is None:
                raise
            await _write(http, response, sse.event(error_body(e)))
            response.force_close()
        await response.write_eof()
        return response

    def _events(self, deltas: list[tuple[int, Delta]]) -> bytes:
        """All that is new in one piece, for one write."""
        events = []
        for index, delta in deltas:
            if not self._opened[index]:
                self._opened[index] = True
                opening = self._builder.opening(index)
                if opening is not None:
                    events.append(sse.event(opening, self._event_id()))
            self._places[index] = sse.Place(delta.position, delta.finish_reason is not None)
            events.append(sse.event(self._builder.chunk(index, delta), self._event_id()))
        return b"".join(events)

    def _ending(self) -> bytes:
        done = sse.done(sse.end_id(self._generation.rid))
        if not self._generation.prompts[0].text.include_usage:
            return done
        return sse.event(self._builder.usage_chunk(self._usage()), self._event_id()) + done

    def _event_id(self) -> str:
        return sse.event_id(self._generation.rid, self._places)

    def _usage(self) -> Json:
        choices, prompts = self._generation.choices, self._generation.prompts
        num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        return usage(num_prompt_tokens, sum(c.num_tokens for c in choices), self._generation.cached_tokens())


async def _write(http: web.Request, response: web.StreamResponse, data: bytes) -> None:
    transport = http.transport
    if transport is not None and len(data) < UNBOUNDED_WRITE_BYTES and not transport.get_write_buffer_size():
        await response.write(data)  # cannot wait: what the client does not take at once fits the buffer
        return
    try:
        async with asyncio.timeout(STALL_S):
            await response.write(data)
    except TimeoutError:
        log.warning("%s: the client takes nothing any more and is cut", http[RID])
        if transport is not None:
            transport.abort()
        raise ConnectionError("the client takes nothing any more") from None
