"""How an answer goes out: when it begins, and what ends it.

A client that reads slowly makes only its own response wait; when it is cut is `http_server.py`'s.

What is in it comes from `generation.py`, how it looks from `responses.py` and `sse.py`.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from services.gateway import sse, tool_formats
from services.gateway.choice_stream import Delta
from services.gateway.errors import ApiError, error_body
from services.gateway.generation import Generation
from services.gateway.http_server import json_response
from services.gateway.logprob_format import Json, TokenDetails
from services.gateway.middleware import ADMISSION
from services.gateway.responses import ChoiceResult, ResponseBuilder, usage
from services.gateway.state import GatewayState
from services.gateway.tokenization import Tokenizer
from shared.protocol import SamplingParams, TextParams

log = logging.getLogger(__name__)

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks a proxy to pass events on as they come
}


async def send(
    http: web.Request, state: GatewayState, tokenizer: Tokenizer, generation: Generation, *, stream: bool
) -> web.StreamResponse:
    """Enters the generation and sends what comes of it, from where the client is on."""
    try:
        async with generation:
            if generation.admission is not None:
                http[ADMISSION] = generation.admission
            answer = Answer(generation, _builder(state, tokenizer, generation))
            return await (answer.stream(http) if stream else answer.whole())
    except asyncio.CancelledError:
        state.metrics.disconnected.inc()
        raise


def _builder(state: GatewayState, tokenizer: Tokenizer, generation: Generation) -> ResponseBuilder:
    text, sampling = generation.prompts[0].text, generation.prompts[0].sampling
    kind = "chatcmpl" if text.api == "chat" else "cmpl"
    return ResponseBuilder(
        text.api, tokenizer, id=f"{kind}-{generation.rid}", model=state.model, created=text.created,
        with_logprobs=sampling.logprobs is not None and not text.hides_logprobs, include_usage=text.include_usage,
        system_fingerprint=text.system_fingerprint or None,
        details=_details(text, sampling),
        call_id_chars=tool_formats.id_chars(text.tool_format), may_call=bool(text.tool_format),
    )  # fmt: skip


def _details(text: TextParams, sampling: SamplingParams) -> TokenDetails:
    return TokenDetails(
        num_echoed=sampling.logprobs if text.echo and not text.hides_logprobs else None,
        num_prompt=text.prompt_logprobs, as_ids=text.return_tokens_as_token_ids, with_ids=text.return_token_ids,
    )  # fmt: skip


async def send_done(http: web.Request, rid: str) -> web.StreamResponse:
    """To a client that has all but the last line."""
    response = await _begun(http)
    await response.write(sse.done(sse.end_id(rid)))
    await response.write_eof()
    return response


class Answer:
    """One response on its way out."""

    def __init__(self, generation: Generation, builder: ResponseBuilder) -> None:
        self._generation = generation
        self._builder = builder
        self._places = list(generation.places)  # None: the client has nothing of the choice
        self._prompt_ids = [prompt.ids for prompt in generation.prompts for _ in range(prompt.num_choices)]

    async def whole(self) -> web.Response:
        results = [ChoiceResult(self._builder, ids) for ids in self._prompt_ids]
        while self._generation.is_running:
            for index, delta in await self._generation.next():
                results[index].add([delta])
        results = self._likeliest(results)
        return json_response(self._builder.whole(results, self._usage()))

    def _likeliest(self, results: list[ChoiceResult]) -> list[ChoiceResult]:
        """Of each prompt's choices as many as are wanted, by their tokens' mean log-probability."""
        num_shown = self._generation.prompts[0].text.num_shown
        if num_shown is None:
            return results
        shown, first = [], 0
        for prompt in self._generation.prompts:
            own = results[first : first + prompt.num_choices]
            shown += sorted(own, key=lambda result: -result.mean_logprob)[:num_shown]
            first += prompt.num_choices
        return shown

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """Begins with the first event, so that what fails before it is an ordinary error; what fails later is one
        error event, and no `[DONE]`."""
        response: web.StreamResponse | None = None
        try:
            while self._generation.is_running:
                deltas = await self._generation.next()
                if deltas or self._generation.is_running:
                    response = response or await _begun(http)
                    await response.write(self._events(deltas) if deltas else sse.KEEP_ALIVE)
            response = response or await _begun(http)  # a client that comes back may have all but the ending
            await response.write(self._ending())
        except ConnectionError:
            raise  # of the client: there is nobody to tell
        except Exception as e:
            if response is None:
                raise
            await response.write(sse.event(error_body(self._told(e))))
            response.force_close()
        await response.write_eof()
        return response

    def _told(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        log.error("%s: a stream failed", self._generation.rid, exc_info=error)
        return ApiError(500, "internal error", code="internal_error")

    def _events(self, deltas: list[tuple[int, Delta]]) -> bytes:
        """All that is new in one piece, for one write."""
        events = self._openings()
        for index, delta in deltas:
            chunk = self._builder.chunk(index, delta, self._prompt_ids[index] if self._places[index] is None else None)
            self._places[index] = sse.Place(delta.position, delta.finish_reason is not None)
            if self._generation.prompts[0].text.continuous_usage:
                chunk["usage"] = self._usage()
            events.append(sse.event(chunk, self._event_id()))
        return b"".join(events)

    def _openings(self) -> list[bytes]:
        """Of every choice that has had none, in their order, whichever of them has text first: the official client's
        stream helper puts choices together by appending them as they come."""
        events = []
        for index, place in enumerate(self._places):
            if place is None and (opening := self._builder.opening(index, self._prompt_ids[index])):
                self._places[index] = sse.Place(0)
                events.append(sse.event(opening, self._event_id()))
        return events

    def _ending(self) -> bytes:
        done = sse.done(sse.end_id(self._generation.rid))
        if not self._generation.prompts[0].text.include_usage:
            return done
        return sse.event(self._builder.usage_chunk(self._usage()), sse.end_id(self._generation.rid)) + done

    def _event_id(self) -> str:
        return sse.event_id(self._generation.rid, self._places)

    def _usage(self) -> Json:
        choices, prompts = self._generation.choices, self._generation.prompts
        num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        return usage(
            num_prompt_tokens, sum(c.num_tokens for c in choices), self._generation.cached_tokens(),
            num_accepted=sum(c.prediction.num_accepted for c in choices),
            num_rejected=sum(c.prediction.num_rejected for c in choices),
            num_reasoning=sum(c.num_reasoning_tokens for c in choices),
        )  # fmt: skip


async def _begun(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(http)
    return response
