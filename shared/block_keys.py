"""Keys of KV blocks: a SHA-256 chain, so that equal keys mean equal tokens from the first one on. *Pure.*

The chain starts from the request's salt (deployment secret, API key and the client's cache_salt, hashed by the
gateway) and the worker's kernel variant (model, tokenizer, KV layout, instruction set), so that blocks of another
tenant or of other numbers are never matched. Keys are computed on both sides, never accepted from a client.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from shared.wire import pack_ids


def request_salt(secret: bytes, api_key_id: str, cache_salt: str) -> bytes:
    """32 bytes; a client's cache_salt narrows the sharing inside its own API key."""
    tenant = hmac.digest(secret, api_key_id.encode(), "sha256")
    return hmac.digest(tenant, cache_salt.encode(), "sha256")


def root_key(salt: bytes, variant: str) -> bytes:
    return hashlib.sha256(salt + variant.encode()).digest()


def next_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """Key of the block of these tokens after the block `parent` (or the root)."""
    return hashlib.sha256(parent + pack_ids(ids)).digest()


def chain(root: bytes, packed_ids: bytes, block_size: int) -> list[bytes]:
    """Keys of all whole blocks of packed_ids (as `pack_ids` packs them)."""
    keys, parent, width = [], root, 4 * block_size
    for start in range(0, len(packed_ids) - width + 1, width):
        parent = hashlib.sha256(parent + packed_ids[start : start + width]).digest()
        keys.append(parent)
    return keys
