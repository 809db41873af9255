"""The ids of calls: 128 bits that nobody guesses, and a tag that tells for which API key they were made. *Pure* but
for the random bits.

By the tag a gateway knows, without asking Redis, whether an id is one of this deployment and of this key: what was
made and is not there any more has expired, and an id of another key's is as unknown as one that was made up.
"""

from __future__ import annotations

import hmac
import re
import secrets

_ID = re.compile(r"[0-9a-f]{40}")


class RequestIds:
    """secret: the deployment's; owner: the id of an API key."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def new(self, owner: str) -> str:
        return self._tagged(secrets.token_bytes(16), owner)

    def repeat_key(self, owner: str, idempotency_key: str) -> str:
        """What stands for an owner's Idempotency-Key in Redis. Not the id of the call: an id has one life, and a key
        may be used again when the call that had it is forgotten."""
        text = f"idempotency key\0{owner}\0{idempotency_key}"
        return hmac.digest(self._secret, text.encode(), "sha256")[:16].hex()

    def is_of(self, rid: str, owner: str) -> bool:
        if _ID.fullmatch(rid) is None:
            return False
        return hmac.compare_digest(self._tagged(bytes.fromhex(rid[:32]), owner), rid)

    def _tagged(self, bits: bytes, owner: str) -> str:
        tag = hmac.digest(self._secret, b"request id\0" + owner.encode() + b"\0" + bits, "sha256")
        return bits.hex() + tag[:4].hex()


def prompt_rid(rid: str, number: int) -> str:
    """The id of the record of a call's prompt."""
    return rid if number == 0 else f"{rid}-{number}"
