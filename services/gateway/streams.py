"""The route by which a client takes up an answer where it left it, at any gateway; also for a call that is repeated.

The answer has the form that was asked for: events, or a whole JSON body. Owns who may have it and from where on; how
it goes out is `answer.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aiohttp import web

from services.gateway import answer, resuming
from services.gateway.admission import unavailable
from services.gateway.auth import OWNER
from services.gateway.generation import Caller, Generation
from services.gateway.http_server import json_response
from services.gateway.middleware import RID
from services.gateway.preparation import PreparedPrompt
from services.gateway.request_ids import prompt_rid
from services.gateway.resuming import Places
from services.gateway.state import GatewayState
from services.gateway.tokenization import Tokenizer
from shared.protocol import TextParams
from shared.records import RequestRecord
from shared.scripts import Repeat
from shared.wire import unpack_ids


@dataclass(frozen=True, slots=True)
class StreamRoutes:
    state: GatewayState
    tokenizer: Tokenizer

    async def get(self, http: web.Request) -> web.StreamResponse:
        rid = self._rid(http)
        after = resuming.after(http.headers, http.query, rid)
        if after is not None and after.places is None:
            return await answer.send_done(http, rid)
        records = await self._records(http)
        places = None if after is None else after.places
        return await self._answer(http, records, records[0].spec.text.stream, places)

    async def delete(self, http: web.Request) -> web.Response:
        """Ends the call, whoever reads it; also one that has ended."""
        for number, record in enumerate(await self._records(http)):
            await self.state.inflight.cancel(prompt_rid(self._rid(http), number), record.spec.num_choices)
        return json_response({"id": http[RID], "object": "stream", "cancelled": True})

    async def join(self, http: web.Request, rid: str, caller: Caller, text: TextParams) -> web.StreamResponse | None:
        """Answers a call that repeats the call `rid`, as itself asks for it (`text`): the same, from the beginning or
        from where its client is. None: that one has failed, and this one is to be another try."""
        http[RID] = rid
        records = [
            replace(record, spec=record.spec.model_copy(update={"text": _as_asked(record.spec.text, text)}))
            for record in await self.state.inflight.find(rid)
        ]
        if not records:
            raise unavailable("the request that this one repeats has just expired; try again", "try_again")
        if records[0].body_digest != caller.repeat.body_digest:
            raise resuming.other_body()
        after = resuming.after(http.headers, {}, http[RID])
        if after is None:
            if await self.state.inflight.give_way(rid, records, caller.repeat.key):
                return None
            return await self._answer(http, records, text.stream, None)
        if after.places is None:
            return await answer.send_done(http, http[RID])
        return await self._answer(http, records, text.stream, after.places)

    def _rid(self, http: web.Request) -> str:
        rid = http.match_info["rid"]
        if not self.state.ids.is_of(rid, http[OWNER]):
            raise resuming.not_found()
        http[RID] = rid
        return rid

    async def _records(self, http: web.Request) -> list[RequestRecord]:
        records = await self.state.inflight.find(self._rid(http))
        if not records:
            raise resuming.expired()
        if records[0].owner != http[OWNER]:
            raise resuming.not_found()
        return records

    async def _answer(
        self, http: web.Request, records: Sequence[RequestRecord], stream: bool, places: Places | None
    ) -> web.StreamResponse:
        self.state.check_open()
        first, settings = records[0], self.state.settings
        num_choices = sum(record.spec.num_choices for record in records)
        if places is not None and (len(places) != num_choices or not stream):
            raise resuming.beyond_the_end()
        prompts = [
            PreparedPrompt(r.prompt_ids, spec.sampling, spec.text, spec.num_choices, unpack_ids(spec.prediction))
            for r, spec in ((record, record.spec) for record in records)
        ]
        starts = [prompt.log_start for prompt in prompts for _ in range(prompt.num_choices)]
        if places is not None and any(place and place.position < s for place, s in zip(places, starts, strict=True)):
            raise resuming.beyond_the_end()
        resume_ms = resuming.resume_ms(http.headers, first.resume_ms, settings.request_timeout_s)
        generation = Generation(
            self.state.inflight, self.state.metrics, self.tokenizer, prompts, rid=http[RID],
            caller=Caller(
                first.owner, first.spec.salt, first.spec.client_id, resume_ms=resume_ms,
                repeat=Repeat(body_digest=first.body_digest),
            ),
            time_limits=first.spec.time_limits, started=asyncio.get_running_loop().time(),
            places=places or (None,) * num_choices,
        )  # fmt: skip
        self.state.metrics.attached.inc()
        return await answer.send(http, self.state, self.tokenizer, generation, stream=stream)


def _as_asked(text: TextParams, asked: TextParams) -> TextParams:
    return text.model_copy(update={"stream": asked.stream, "include_usage": asked.include_usage})
