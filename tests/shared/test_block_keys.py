"""Keys of blocks: equal keys only for equal tokens, tenants and kernels, and the same on both sides of the wire."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from shared.block_keys import chain, next_key, request_salt, root_key
from shared.wire import pack_ids

IDS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)
ROOT = root_key(bytes(32), "v1")


@given(IDS, st.integers(1, 9))
def test_a_chain_is_one_key_after_another(ids: list[int], block_size: int) -> None:
    keys, parent = [], ROOT
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = next_key(parent, ids[start : start + block_size])
        keys.append(parent)
    assert chain(ROOT, pack_ids(ids), block_size) == keys
    assert len(keys) == len(ids) // block_size


@given(IDS, IDS, st.integers(1, 4))
def test_chains_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int], block_size: int) -> None:
    size = block_size
    for i, (ka, kb) in enumerate(zip(chain(ROOT, pack_ids(a), size), chain(ROOT, pack_ids(b), size), strict=False)):
        assert (ka == kb) == (a[: (i + 1) * size] == b[: (i + 1) * size])


def test_a_key_depends_on_everything_before() -> None:
    keys = {chain(root_key(salt, variant), pack_ids([1, 2]), 2)[0] for salt in SALTS for variant in ("v1", "v2")}
    assert len(keys) == 2 * len(SALTS)


SALTS = [
    request_salt(secret, key, cache_salt)
    for secret in (b"s", b"t")
    for key in ("", "k")
    for cache_salt in ("", "k", "kk")
]


def test_salts_differ_by_secret_key_and_cache_salt() -> None:
    assert len(set(SALTS)) == len(SALTS) and {len(salt) for salt in SALTS} == {32}


def test_a_tenant_cannot_name_anothers_salt() -> None:
    """No cache_salt of one API key gives the salt of another, however they are cut."""
    assert request_salt(b"s", "ab", "c") != request_salt(b"s", "a", "bc")


def test_the_keys_are_those_of_stored_inventories() -> None:
    """Recorded: a change makes every sealed block unfindable, which needs a new protocol version."""
    expected = hashlib.sha256(hashlib.sha256(bytes(32) + b"v1").digest() + b"\1\0\0\0\2\0\0\0").digest()
    assert next_key(ROOT, [1, 2]) == expected
