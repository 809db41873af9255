"""The gateway's process: its loops, its HTTP server, and how both come to an end.

Builds what the routes share and runs it; decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from redis.asyncio import Redis

from services.gateway.app import make_app
from services.gateway.body import Bodies
from services.gateway.completions import CompletionRoutes
from services.gateway.dialect import dialect_of
from services.gateway.fleet import Fleet
from services.gateway.http_server import ACCEPTS_AT_ONCE, Guard, Runner, max_connections, widen_backlogs
from services.gateway.inflight import Inflight
from services.gateway.intake import Intake
from services.gateway.metrics_defs import GatewayMetrics
from services.gateway.pages import PageRoutes
from services.gateway.redis_calls import in_time
from services.gateway.request_ids import RequestIds
from services.gateway.state import GatewayState
from services.gateway.streams import StreamRoutes
from services.gateway.tokenization import Tokenizer
from shared import metrics
from shared.bus import LOST
from shared.records import Records
from shared.runtime import Stop, forever, once, run_until_stopped
from shared.scripts import KeyLimits, Scripts
from shared.settings import CommonSettings, GatewaySettings, LimitSettings

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 3.0
HANDLER_END_S = 0.2  # for handlers to end once they are cancelled


class CannotListen(Exception):
    """The address is not to be had; one sentence for the operator."""


class GatewayService:
    """port is known once `run` has begun to listen (settings may ask for any free one)."""

    def __init__(
        self, redis: Redis, tokenizer: Tokenizer, common: CommonSettings, own: GatewaySettings, limits: LimitSettings
    ) -> None:
        self._redis = redis
        self._scripts = Scripts(redis, common.served_name)
        records = Records(redis, self._scripts.prefix)
        self._common = common
        self._own = own
        self._limits = limits
        self.inflight = Inflight(
            redis, self._scripts, records, incarnation=common.incarnation, max_requests=own.max_queued_requests,
            max_tokens=own.max_queued_tokens, retention_ms=int(common.retention_s * 1000),
            volatile=common.volatile,
            key_limits=KeyLimits(
                limits.max_concurrency_per_key, limits.requests_per_minute_per_key, limits.tokens_per_minute_per_key
            ),
        )  # fmt: skip
        self.fleet = Fleet(redis, records, self._scripts.prefix)
        self.bodies = Bodies(own.max_body_bytes)
        self.metrics = GatewayMetrics()
        dialect = dialect_of(tokenizer, own.tool_call_parser, own.reasoning_parser)
        self.intake = Intake(tokenizer, common.served_name, self.fleet, own.max_num_choices, dialect, own.strict)
        self.guard = Guard(limits.send_timeout_s, max_connections(limits.max_connections))
        self._secret = b""
        self._drawn_secret = b""
        self.listening = asyncio.Event()
        self.port = 0

    async def run(self, stop: Stop) -> None:
        """Serves until stop; CannotListen when the address is not to be had."""
        try:
            if await once("secret", self._learn_secret, stop):
                await self._serve(stop)
        finally:
            await self.intake.close()

    async def _serve(self, stop: Stop) -> None:
        state = GatewayState(
            self._own, self._limits, self._common.served_name, self._secret, self.inflight, self.fleet, self.metrics,
            RequestIds(self._secret), self.bodies,
        )  # fmt: skip
        pages = PageRoutes(state, self.intake, self.render_metrics, int(time.time()))
        streams = StreamRoutes(state, self.intake.tokenizer)
        self.app = make_app(state, CompletionRoutes(state, self.intake, streams), streams, pages)
        runner = Runner(self.app, self.guard, shutdown_timeout_s=HANDLER_END_S)
        await runner.setup()
        try:
            if await once("join", self.inflight.refresh, stop) and await once("fleet", self.fleet.turn, stop):
                await self._listen(runner)
                await self._loop(state, runner, stop)
        finally:
            await runner.cleanup()
            await self._leave()

    async def _loop(self, state: GatewayState, runner: Runner, stop: Stop) -> None:
        drained = Stop()
        await run_until_stopped(
            [
                forever("stream", self.inflight.turn, drained),
                forever("settle", self.inflight.settle_next, drained),
                forever("fleet", self.fleet.turn, drained),
                forever("metrics", self._watch, drained),
                self._drain(state, runner, stop, drained),
            ],
            drained,
        )

    async def _drain(self, state: GatewayState, runner: Runner, stop: Stop, drained: Stop) -> None:
        """Takes nothing new from the first signal on; open responses get their time to finish, until the second."""
        await stop.wait()
        state.draining = True
        for site in list(runner.sites):
            await site.stop()
        ends = [asyncio.ensure_future(self.inflight.idle()), asyncio.ensure_future(stop.in_a_hurry())]
        await asyncio.wait(ends, timeout=self._common.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self.inflight.requests:
            log.warning("%d open responses are left to other gateways", len(self.inflight.requests))
            self.inflight.begin_to_leave()
        drained.set()

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self.inflight.leave()
        except LOST as e:
            log.warning("Redis does not hear that this gateway leaves (%s); its lease will run out", e)

    async def _learn_secret(self) -> None:
        """The configured one; else one drawn once for all gateways of the model, so that they share cached prefixes."""
        if self._common.secret:
            self._secret = self._common.secret.encode()
            return
        await self._share_secret(secrets.token_bytes(32))
        secret = await self._redis.get(self._scripts.key("secret"))
        assert isinstance(secret, bytes)
        self._secret = self._drawn_secret = secret

    async def _share_secret(self, secret: bytes) -> None:
        """Where there is none yet, or none any more."""
        await self._redis.set(self._scripts.key("secret"), secret, nx=True)

    async def _listen(self, runner: Runner) -> None:
        host, port = self._own.host, self._own.port
        with _listening(host, port):
            await web.TCPSite(runner, host, port, backlog=ACCEPTS_AT_ONCE).start()
        widen_backlogs(runner)
        self.port = int(runner.addresses[0][1])
        self.listening.set()
        log.info("listening on %s port %d", host, self.port)

    # --- metrics -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Publishes the metrics now and then."""
        await asyncio.sleep(metrics.PUBLISH_EVERY_S)
        self._observe()
        publishing = metrics.publish(
            self._redis, self._scripts.prefix, "gateway", self.inflight.incarnation, self.metrics.registry
        )
        await in_time(publishing)
        if self._common.volatile and self._drawn_secret:
            await in_time(self._share_secret(self._drawn_secret))

    def _observe(self) -> None:
        self.metrics.open_requests.set(len(self.inflight.requests))
        self.metrics.observe_connections(self.guard)
        self.metrics.process.observe()

    async def render_metrics(self) -> bytes:
        """All services' metrics; only this gateway's own while Redis is away."""
        self._observe()
        own = ("gateway", self.inflight.incarnation, metrics.snapshot(self.metrics.registry))
        others = [(m.kind, m.incarnation) for m in self.fleet.members if m.incarnation != self.inflight.incarnation]
        try:
            rows = await in_time(metrics.collect(self._redis, self._scripts.prefix, others))
        except LOST:
            rows = []
        return metrics.render([own, *rows])


@contextmanager
def _listening(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        reasons = {errno.EADDRINUSE: "it is in use", errno.EACCES: "that is not permitted"}
        reason = reasons.get(e.errno or 0, "the address is not one of this machine")
        raise CannotListen(f"cannot listen on {host} port {port}: {reason}") from e
