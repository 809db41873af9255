"""API keys: who is let in, on which routes, and what a key's id says."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.auth import OPEN_ID, PUBLIC_ROUTES, ApiKeys, key_id
from shared.block_keys import request_salt
from shared.settings import GatewaySettings, SettingsError, load, secret_values
from tests.gateway.conftest import Served
from tests.gateway.raw_client import RawClient
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]
KEYS = ("key-of-alice", "key-of-bob")


def test_each_key_has_its_own_owner() -> None:
    keys = ApiKeys(KEYS)
    assert keys.owner("Bearer key-of-alice") == key_id(KEYS[0])
    assert keys.owner("bearer  key-of-bob ") == key_id(KEYS[1])
    assert key_id(KEYS[0]) != key_id(KEYS[1])


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer key-of-alic", "Bearer key-of-alice2", "Basic key-of-alice", "key-of-alice",
     "Bearer key-of-alice key-of-bob", "Bearer \udcff"],
)  # fmt: skip
def test_anything_else_is_nobody(header: str) -> None:
    assert ApiKeys(KEYS).owner(header) is None


def test_without_keys_everybody_is_one_owner() -> None:
    assert ApiKeys(()).owner("") == ApiKeys(()).owner("Bearer x") == OPEN_ID


def test_every_digest_is_compared_also_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("services.gateway.auth.hmac.compare_digest", compare)
    ApiKeys(KEYS).owner("Bearer key-of-alice")
    assert len(compared) == len(KEYS)


def test_a_key_may_be_given_by_its_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(KEYS[1].encode()).hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# alice\n{KEYS[0]}\n\nsha256:{digest}\n")
    settings = load(GatewaySettings, {"HEADRACE_API_KEYS": "key-of-carol", "HEADRACE_API_KEYS_FILE": str(file)})
    keys = ApiKeys(settings.keys)
    for key in (*KEYS, "key-of-carol"):
        assert keys.owner(f"Bearer {key}") == key_id(key) == ApiKeys([key]).owner(f"Bearer {key}")
    assert keys.owner(f"Bearer sha256:{digest}") is None and keys.owner(f"Bearer {digest}") is None
    assert set(KEYS[:1]) <= set(secret_values(settings))


def test_keys_are_kept_as_digests_alone() -> None:
    assert not any(key in repr(vars(ApiKeys(KEYS))) for key in KEYS)


@pytest.mark.parametrize("key", ["sha256:", "sha256:12", "sha256:" + "x" * 64])
def test_what_is_no_digest_is_a_mistake(key: str) -> None:
    with pytest.raises(SettingsError, match="not the digest"):
        ApiKeys([key])


def test_a_file_of_keys_opens_an_address_to_others_and_a_missing_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k\n")
    environ = {"HEADRACE_HOST": "0.0.0.0", "HEADRACE_API_KEYS_FILE": str(tmp_path / "keys")}
    assert load(GatewaySettings, environ).keys == ("k",)
    with pytest.raises(SettingsError, match="api_keys_file: cannot be read"):
        load(GatewaySettings, environ | {"HEADRACE_API_KEYS_FILE": str(tmp_path / "none")})
    (tmp_path / "keys").write_text("# nobody yet\n")
    with pytest.raises(SettingsError, match="can be reached by others"):
        load(GatewaySettings, environ)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_an_address_that_others_reach_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(SettingsError, match=r"--api-key.*--no-auth"):
        load(GatewaySettings, {"HEADRACE_HOST": host})
    assert load(GatewaySettings, {"HEADRACE_HOST": host, "HEADRACE_API_KEYS": "k"}).api_keys == ("k",)
    assert load(GatewaySettings, {"HEADRACE_HOST": host, "HEADRACE_NO_AUTH": "1"}).no_auth


async def test_every_route_but_liveness_and_readiness_asks_for_a_key(serve_with: Serve) -> None:
    served = await serve_with(api_keys=KEYS)
    app = served.service.app
    routes = {(route.method, route.resource.canonical, route.name) for route in app.router.routes() if route.resource}
    assert len(routes) > 10
    for method, path, name in routes:
        async with served.session.request(method, served.url + path.replace("{model}", "m")) as response:
            if name in PUBLIC_ROUTES:
                assert response.status == 200
            else:
                assert response.status == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
            if method != "HEAD":
                await response.json()


@pytest.mark.parametrize(
    "target",
    ["/nowhere", "//v1/models", "/v1/../v1/models", "/%76%31/models", "/v1/models/", "/health/live/../../v1/models",
     "http://elsewhere/v1/models", "/health/live/x", "/health/live%2f..%2f..%2fv1%2fmodels", "/health/live;x"],
)  # fmt: skip
async def test_odd_paths_open_nothing(serve_with: Serve, target: str) -> None:
    served = await serve_with(api_keys=KEYS)
    client = await RawClient.connect(served)
    client.writer.write(f"GET {target} HTTP/1.1\r\nHost: health/live\r\n\r\n".encode())
    assert (await client.reader.readline()).split(b" ")[1] in (b"401", b"400")
    client.close()


async def test_the_key_decides_owner_and_salt(serve_with: Serve) -> None:
    served = await serve_with(api_keys=KEYS)
    records = {}
    for key in KEYS:
        client = await RawClient.connect(served)
        client.post("/v1/completions", {"prompt": "x"}, f"Authorization: Bearer {key}\r\n")
        [sid] = await wait_until(served.worker.queued)
        records[key] = await served.worker.records.request(sid.rpartition(".")[0])
        client.close()
        await wait_until(lambda: nothing(served.worker.queued()))
    alice, bob = records[KEYS[0]], records[KEYS[1]]
    assert alice is not None and bob is not None
    assert alice.owner == key_id(KEYS[0])
    assert alice.spec.salt != bob.spec.salt
    secret = await served.worker.redis.get(served.worker.scripts.key("secret"))
    assert alice.spec.salt == request_salt(secret, alice.owner, "")


async def test_neither_keys_nor_texts_are_logged(
    serve_with: Serve, answering: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answering(lambda request, choice: list(b"answer"))
    served = await serve_with(api_keys=KEYS)
    headers = {"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": "named-by-client"}
    status, _, _ = await served.post("/v1/completions", {"prompt": "question", "max_tokens": 6}, headers=headers)
    assert status == 200
    assert (await served.post("/v1/completions", {}, headers={"Authorization": "Bearer key-of-eve"}))[0] == 401
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("services"))
    assert "named-by-client" in logged
    for secret in (*KEYS, "key-of-eve", "question", "answer"):
        assert secret not in logged


async def nothing(asked: Awaitable[list[Any]]) -> bool:
    return await asked == []
