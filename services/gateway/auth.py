"""Who may call: API keys, checked on every route but those named public here. *Pure* but for aiohttp's request type.

The decision is keyed on the route that aiohttp resolved, never on the path as it was written. A key is compared as a
digest, against all of them, in constant time. Its id stands for it elsewhere: as owner in records, and in the salt
that keeps one key's cached blocks from another.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from services.gateway.errors import ApiError
from shared.settings import SettingsError

PUBLIC_ROUTES = frozenset({"health", "live", "ready"})
DIGEST_MARK = "sha256:"
OPEN_ID = "open"  # everybody's, where no key is configured
OWNER: web.RequestKey[str] = web.RequestKey("owner", str)


class ApiKeys:
    """Kept as digests alone; a key may be given as `sha256:` and the digest of its text, in hexadecimal."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._ids = {digest: _id_of(digest) for digest in map(_digest_of_setting, keys)}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def owner(self, authorization: str) -> str | None:
        """The id of the key in an Authorization header; None if it has none that is known."""
        if not self._ids:
            return OPEN_ID
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        owner = None
        for digest, id in self._ids.items():
            if hmac.compare_digest(digest, given):
                owner = id
        return owner


def key_id(key: str) -> str:
    return _id_of(_digest(key))


def _id_of(digest: bytes) -> str:
    """Not a part of the digest that is compared, so that knowing an id is no help in finding its key's digest."""
    return hashlib.sha256(b"headrace key id\0" + digest).hexdigest()[:16]


def _digest_of_setting(key: str) -> bytes:
    if not key.startswith(DIGEST_MARK):
        return _digest(key)
    try:
        digest = bytes.fromhex(key.removeprefix(DIGEST_MARK))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise SettingsError(f"an API key begins with {DIGEST_MARK} and is not the digest of one")
    return digest


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def middleware(keys: ApiKeys) -> Middleware:
    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A path without a route has none of the public names either: what exists is told only to who may ask.
        if request.match_info.route.name not in PUBLIC_ROUTES:
            owner = keys.owner(request.headers.get("Authorization", ""))
            if owner is None:
                raise ApiError(401, "a valid API key is required: Authorization: Bearer ...", code="invalid_api_key")
            request[OWNER] = owner
        return await handler(request)

    return authorize
