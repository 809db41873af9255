"""The two routes that generate: chat and completions, streamed or whole.

Owns what a call is admitted as. How it is answered is `answer.py`'s, how it is taken up again `streams.py`'s.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from services.gateway import answer, resuming
from services.gateway.admitting import Repeated
from services.gateway.auth import OWNER
from services.gateway.deadlines import time_limits
from services.gateway.generation import Caller, Generation
from services.gateway.intake import Intake
from services.gateway.middleware import CLIENT_ID, RID
from services.gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.state import GatewayState
from services.gateway.streams import StreamRoutes
from shared.block_keys import request_salt
from shared.scripts import NO_REPEAT, Repeat


@dataclass(frozen=True, slots=True)
class CompletionRoutes:
    state: GatewayState
    intake: Intake
    streams: StreamRoutes

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, ChatCompletionRequest)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, CompletionRequest)

    async def _answer(
        self, http: web.Request, cls: type[ChatCompletionRequest] | type[CompletionRequest]
    ) -> web.StreamResponse:
        started = asyncio.get_running_loop().time()
        async with self.state.bodies.read(http) as body:
            self.state.check_open()
            request, prompts = await self.intake.generation(cls, body, http[OWNER])
            caller = await self._caller(http, body, request)
        del body  # as large as it may be, and the answer may take long
        limits = time_limits(self.state.settings, self.state.limits, http.headers, request.timeout)
        while True:
            http[RID] = self.state.ids.new(caller.owner)
            generation = Generation(
                self.state.inflight, self.state.metrics, self.intake.tokenizer, prompts, rid=http[RID], caller=caller,
                time_limits=limits, started=started,
            )  # fmt: skip
            try:
                return await answer.send(http, self.state, self.intake.tokenizer, generation, stream=request.stream)
            except Repeated as e:
                response = await self.streams.join(http, e.rid, caller, prompts[0].text)
            if response is not None:
                return response

    async def _caller(
        self, http: web.Request, body: bytes, request: ChatCompletionRequest | CompletionRequest
    ) -> Caller:
        """Who asks, and for how long and by whom else the answer may be taken up."""
        owner = http[OWNER]
        key, repeat = resuming.idempotency_key(http.headers), NO_REPEAT
        if key is not None:
            repeat = Repeat(self.state.ids.repeat_key(owner, key), await self.intake.digest(http.path, body))
        default_ms = round(self.state.settings.resume_s * 1000) or (resuming.RETRY_MS if key else 0)
        return Caller(
            owner, request_salt(self.state.secret, owner, request.cache_salt or ""), http[CLIENT_ID],
            resume_ms=resuming.resume_ms(http.headers, default_ms, self.state.settings.request_timeout_s),
            repeat=repeat,
        )  # fmt: skip
