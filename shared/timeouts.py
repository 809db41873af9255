"""How a request ends whose time is over: in the same words wherever that is noticed, in a scheduler or a gateway."""

from __future__ import annotations

from shared.protocol import Outcome


def _over(code: str, message: str) -> Outcome:
    return Outcome(reason="error", code=code, message=message)


QUEUE = _over("queue_timeout", "no worker could take the request within its queue timeout")
FIRST_TOKEN = _over("first_token_timeout", "the first token did not come in time")
INTER_TOKEN = _over("inter_token_timeout", "the next token did not come in time")
TOTAL = _over("timeout", "the request took too long")
