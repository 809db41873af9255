"""One HTTP call's choices while they are generated: admitted requests on one side, deltas for a client on the other.

Owns the life of the call's open requests: they are admitted together, and whatever ends the call ends them. Knows
neither HTTP nor the shape of an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway import deadlines, resuming
from services.gateway.attaching import CANCELLED, TooManyAttachments
from services.gateway.choice_stream import ChoiceStream, Delta
from services.gateway.errors import ApiError
from services.gateway.inflight import Inflight
from services.gateway.metrics_defs import GatewayMetrics
from services.gateway.open_request import Moved, OpenRequest, RequestLost
from services.gateway.preparation import PreparedPrompt
from services.gateway.request_ids import prompt_rid
from services.gateway.resuming import Places
from services.gateway.tokenization import Tokenizer
from shared.protocol import FinishReason, Outcome, RequestSpec, TimeLimits, TokenChunk
from shared.scripts import NO_REPEAT, Admission, Repeat
from shared.wire import ProtocolError, pack_ids

log = logging.getLogger(__name__)
TICK_S = 15.0  # silence after which a client is shown that the connection lives
# Errors found behind the gateway that lie in the request; all others are the server's.
STATUS_OF_CODE = {
    "context_length_exceeded": 400, "invalid_request": 400, "cancelled": 410, "client_gone": 410, "gateway_gone": 410,
    "timeout": 504, "queue_timeout": 504, "first_token_timeout": 504, "inter_token_timeout": 504,
    "deadline_exceeded": 504, "grammar_too_complex": 400,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the owner of the records, the salt of the blocks, the caller's own name for the call, how long it goes
    on without a client, and by what others that repeat it find it."""

    owner: str
    salt: bytes
    client_id: str = ""
    resume_ms: int = 0
    repeat: Repeat = NO_REPEAT


class Generation:
    """Use as a context manager: entering admits the call (TryLater if refused, Repeated if it was admitted before), or
    attaches to one that was; leaving ends what still runs, unless the client may come back.

    The choices are numbered through the prompts: choice i of prompt p is p * n + i. One that wants no token is not
    admitted at all.
    """

    def __init__(
        self, inflight: Inflight, metrics: GatewayMetrics, tokenizer: Tokenizer, prompts: Sequence[PreparedPrompt],
        *, rid: str, caller: Caller, time_limits: TimeLimits, started: float, places: Places | None = None,
    ) -> None:  # fmt: skip
        """started: loop time at which the call came. places: where its client is, of a call that is taken up again."""
        self.rid = rid
        self.prompts = prompts
        self._attaches = places is not None
        num_choices = sum(prompt.num_choices for prompt in prompts)
        self.places = places or (None,) * num_choices
        self.choices = [
            ChoiceStream(
                p.text, p.sampling, tokenizer, prompt_ids=p.ids, resume_at=place.position if place else None,
                resume_finished=place is not None and place.ended, prediction=p.prediction,
            )
            for p, place in zip([p for p in prompts for _ in range(p.num_choices)], self.places, strict=True)
        ]  # fmt: skip
        self._inflight = inflight
        self._metrics = metrics
        self._caller = caller
        self._time_limits = time_limits
        self._wake = asyncio.Event()
        self._requests: list[tuple[int, OpenRequest]] = []  # with the number of its first choice
        self._timers: deadlines.Timers | None = None
        self._ticks: asyncio.TimerHandle | None = None
        self._outcome = CANCELLED  # of what still runs when this ends
        self._opened: list[tuple[int, Delta]] = []
        self._num_running = 0
        self._expired: Outcome | None = None
        self._silent = False
        self._num_told = 0
        self._started = started
        self._last_at = [0.0] * num_choices
        self._failures: list[ApiError] = []
        self._is_moved = False

    async def __aenter__(self) -> Generation:
        for index, choice in enumerate(self.choices):
            self._opened += [(index, delta) for delta in choice.open()]
        open_prompts = []  # with their numbers, and those of their first choices
        first = 0
        for number, prompt in enumerate(self.prompts):
            if self.choices[first].finish_reason is None:
                open_prompts.append((number, first, prompt))
            first += prompt.num_choices
        if open_prompts:
            await (self._attach if self._attaches else self._admit)(open_prompts)
        requests = [request for _, request in self._requests]
        self._timers = deadlines.Timers(
            self._time_limits, requests, self._expire, self._inflight.end_if_never_placed, resumed=self._attaches
        )
        self._tick(-1)
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._end(client_left=isinstance(error, asyncio.CancelledError | ConnectionError))

    async def _admit(self, open_prompts: list[tuple[int, int, PreparedPrompt]]) -> None:
        specs = [
            RequestSpec(
                rid=prompt_rid(self.rid, number), num_choices=prompt.num_choices, num_prompt_tokens=len(prompt.ids),
                salt=self._caller.salt, sampling=prompt.sampling, text=prompt.text, client_id=self._caller.client_id,
                num_prompts=len(self.prompts), time_limits=self._time_limits, prediction=pack_ids(prompt.prediction),
                priority=prompt.priority,
            )
            for number, _, prompt in open_prompts
        ]  # fmt: skip
        requests = await self._inflight.submit(
            [(spec, pack_ids(prompt.ids)) for spec, (_, _, prompt) in zip(specs, open_prompts, strict=True)],
            self._caller.owner, self._wake, resume_ms=self._caller.resume_ms, repeat=self._caller.repeat,
        )  # fmt: skip
        for request, (_, first, prompt) in zip(requests, open_prompts, strict=True):
            self._requests.append((first, request))
            self._num_running += prompt.num_choices
            self._metrics.prompt_tokens.inc(len(prompt.ids))
            self._metrics.prompt_length.observe(len(prompt.ids))

    async def _attach(self, open_prompts: list[tuple[int, int, PreparedPrompt]]) -> None:
        try:
            for number, first, prompt in open_prompts:
                request = await self._inflight.attach(
                    prompt_rid(self.rid, number), prompt.num_choices, self._wake, resume_ms=self._caller.resume_ms,
                    shared=bool(self._caller.repeat.body_digest), log_start=prompt.log_start,
                )  # fmt: skip
                self._requests.append((first, request))
                self._num_running += prompt.num_choices
        except BaseException as e:
            self._is_moved = isinstance(e, Moved)
            self._end(client_left=True)
            match e:
                case RequestLost():
                    raise resuming.expired() from None
                case Moved():
                    raise resuming.moved() from None
                case TooManyAttachments():
                    raise resuming.too_many() from None
            raise

    def _end(self, *, client_left: bool) -> None:
        for timer in (self._timers, self._ticks):
            if timer is not None:
                timer.cancel()
        for _, request in self._requests:
            if self._is_moved:
                self._inflight.forget(request)
            elif client_left:
                self._inflight.client_left(request)
            else:
                self._inflight.close(request, self._outcome)
        log.info("%s", self)

    def __str__(self) -> str:
        """What a log may say of it: no text of anybody but the caller's own id."""
        num_prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        ends = ",".join(choice.finish_reason or "unfinished" for choice in self.choices)
        called = f" ({self._caller.client_id})" if self._caller.client_id else ""
        took = asyncio.get_running_loop().time() - self._started
        return (
            f"{self.rid}{called}: {num_prompt_tokens} prompt tokens, {self.cached_tokens()} of them cached, "
            f"{sum(choice.num_tokens for choice in self.choices)} output tokens, {ends}, {took:.2f} s"
        )

    @property
    def is_running(self) -> bool:
        """Whether a delta can still come."""
        return bool(self._opened) or bool(self._failures) or self._num_running > 0

    async def next(self) -> list[tuple[int, Delta]]:
        """What is new, by choice, in order; nothing after a time of silence, or when a client that came back had all.
        ApiError when the request failed or another connection answers it by now."""
        if self._opened:
            opened, self._opened = self._opened, []
            return opened
        while self._num_running or self._failures:
            if self._failures:
                raise next((e for e in self._failures if e.code != "cancelled"), self._failures[0])
            await self._wake.wait()
            self._wake.clear()
            if self._expired is not None:
                self._outcome = self._expired
                raise self._failure(self._expired)
            deltas: list[tuple[int, Delta]] = []
            for first, request in self._requests:
                deltas += await self._take(first, request)
            self._num_told += len(deltas)
            if deltas or self._silent:
                self._silent = False
                return deltas
        return []

    @property
    def admission(self) -> Admission | None:
        """What was said when the call was admitted here."""
        return self._requests[0][1].admission if self._requests else None

    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed: of a prompt's choices, only what none of them had to compute."""
        cached, first = 0, 0
        for prompt in self.prompts:
            cached += min(choice.cached_tokens for choice in self.choices[first : first + prompt.num_choices])
            first += prompt.num_choices
        return cached

    async def _take(self, first: int, request: OpenRequest) -> list[tuple[int, Delta]]:
        try:
            events = await self._inflight.take(request)
        except Moved:
            self._is_moved = True
            raise resuming.moved() from None
        except RequestLost:
            raise ApiError(500, "the request was lost", code="request_lost") from None
        except ProtocolError as e:
            log.error("%s: %s", request.rid, e)
            raise ApiError(500, "internal error", code="internal_error") from None
        deltas: list[tuple[int, Delta]] = []
        for number, item in events:
            index = first + number
            if self.choices[index].finish_reason is not None:
                continue
            if isinstance(item, TokenChunk):
                new = self._feed(index, request, number, item)
            elif item.reason in ("stop", "length"):
                new = self.choices[index].close(item.reason)
            else:
                self._failures.append(self._failure(item))  # told when what came before it has been
                continue
            deltas += [(index, delta) for delta in new]
            if self.choices[index].finish_reason is not None:
                self._choice_ended(index, is_news=number not in request.ended_before)
        return deltas

    def _feed(self, index: int, request: OpenRequest, number: int, chunk: TokenChunk) -> list[Delta]:
        choice = self.choices[index]
        self._observe(index, len(chunk.ids))
        deltas = choice.feed(chunk)
        if choice.finish_reason is not None:
            if chunk.finish:
                request.open_choices.discard(number)  # the worker has said so itself, in the same commit
            else:
                reason: FinishReason = "stop" if choice.finish_reason == "stop" else "length"
                self._inflight.finish(request, number, Outcome(reason=reason, num_tokens=choice.num_tokens))
        return deltas

    def _observe(self, index: int, num_tokens: int) -> None:
        if self._attaches:
            return  # much of it is told again, and not as it came
        now = asyncio.get_running_loop().time()
        last = self._last_at[index]
        if last:
            self._metrics.inter_token_s.observe((now - last) / max(1, num_tokens))
        else:
            self._metrics.first_token_s.observe(now - self._started)
        self._last_at[index] = now

    def _choice_ended(self, index: int, *, is_news: bool) -> None:
        self._num_running -= 1
        choice, place = self.choices[index], self.places[index]
        if place is not None and place.position > choice.position:
            self._failures.append(resuming.beyond_the_end())
        if not is_news:
            return
        self._metrics.finished.labels(choice.finish_reason or "").inc()
        self._metrics.generation_tokens.inc(choice.num_tokens)
        self._metrics.end_to_end_s.observe(asyncio.get_running_loop().time() - self._started)

    def _failure(self, outcome: Outcome) -> ApiError:
        """What a client is told of an ending that is none. A service's message is written for clients."""
        code = outcome.code or outcome.reason
        self._metrics.failed.labels(code).inc()
        unsaid = "the request was cancelled" if outcome.reason == "cancelled" else "internal error"
        return ApiError(STATUS_OF_CODE.get(code, 500), outcome.message or unsaid, code=code)

    def _expire(self, outcome: Outcome) -> None:
        self._expired = self._expired or outcome
        self._wake.set()

    def _tick(self, num_seen: int) -> None:
        """Costs nothing a token: only looks, every so often, whether the client was told of any."""
        if self._num_told == num_seen:
            self._silent = True
            self._wake.set()
        self._ticks = asyncio.get_running_loop().call_later(TICK_S, self._tick, self._num_told)
