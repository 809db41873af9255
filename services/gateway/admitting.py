"""How calls are admitted: asked again while replies are lost, and what a refusal means for the client.

Knows the bounds of the queue and how fast it drains; what is open at this gateway is `inflight.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from services.gateway.admission import DrainMeter, refused, unavailable
from services.gateway.kept import Kept
from services.gateway.open_request import OpenRequest
from services.gateway.redis_calls import in_time
from shared.bus import LOST, CannotWrite, backoff
from shared.protocol import RequestSpec
from shared.scripts import Admission, KeyLimits, Repeat, Scripts

log = logging.getLogger(__name__)

ADMIT_TIMEOUT_S = 6.0  # of all tries; longer than Redis takes to restart

Specs = Sequence[tuple[RequestSpec, bytes]]  # of a call, with their packed prompts


class Repeated(Exception):
    """This call has been admitted before, as `rid`; it can be attached to."""

    def __init__(self, rid: str) -> None:
        super().__init__(rid)
        self.rid = rid


class Admitting:
    """max_requests and max_tokens bound the whole deployment's queue, not this gateway's share of it."""

    def __init__(
        self, scripts: Scripts, *, max_requests: int, max_tokens: int, retention_ms: int, key_limits: KeyLimits,
        clock: Callable[[], float], volatile: bool = False,
    ) -> None:  # fmt: skip
        self._scripts = scripts
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._retention_ms = retention_ms
        self._key_limits = key_limits
        self._clock = clock
        self._volatile = volatile
        self._drained = DrainMeter()

    async def admit(self, requests: Sequence[OpenRequest], specs: Specs, owner: str, repeat: Repeat) -> None:
        """TryLater when the call is refused, or Redis does not answer; then `in_redis` tells whether it may be there.
        Repeated when the call was there before."""
        try:
            admission = await self._ask(requests, specs, owner, repeat)
        except CannotWrite:
            raise unavailable("the server is out of memory or storage", "storage_full", 5) from None
        except TimeoutError:
            raise unavailable("the queue does not answer", "queue_unreachable") from None
        self._drained.read(admission.num_left, self._clock())
        is_repeated = admission.status == "exists" and admission.rid != requests[0].rid
        for request, (spec, prompt) in zip(requests, specs, strict=True):
            request.admission = admission
            if self._volatile:
                request.kept = Kept(self._scripts, spec, prompt, owner, self._retention_ms, repeat)
            request.in_redis = admission.accepted and not is_repeated  # what is there is another's
        if is_repeated:
            raise Repeated(admission.rid)
        if not admission.accepted:
            raise refused(admission, max(spec.num_prompt_tokens for spec, _ in specs), self._drained)

    async def _ask(self, requests: Sequence[OpenRequest], specs: Specs, owner: str, repeat: Repeat) -> Admission:
        """Repeats with the same ids while replies are lost: `admit` does a thing once."""
        is_first = True
        async with asyncio.timeout(ADMIT_TIMEOUT_S):
            async for _ in backoff():
                try:
                    admission = self._scripts.admit(
                        specs, gateway=requests[0].gateway, owner=owner, priority=specs[0][0].priority,
                        max_requests=self._max_requests, max_tokens=self._max_tokens, retention_ms=self._retention_ms,
                        key_limits=self._key_limits, resume_ms=requests[0].resume_ms, repeat=repeat,
                    )  # fmt: skip
                    return await in_time(admission)
                except CannotWrite:
                    for request in requests:
                        request.in_redis = not is_first  # if not the first, an earlier one may have run
                    raise
                except LOST as e:
                    is_first = False
                    log.warning("admission of %s is repeated: %s", requests[0].rid, e)
        raise AssertionError("unreachable: backoff never ends")
