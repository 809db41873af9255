"""Which Redis a service refuses to start on, and that TLS is really spoken: real servers, real certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from shared import bus
from shared.embedded_redis import find_server
from shared.settings import CommonSettings, SettingsError, load
from tests import helpers
from tests.tls import make_certificates, tls_redis


async def check(url: str, *, volatile: bool = False) -> None:
    client = bus.connect(url)
    try:
        await bus.wait_for_redis(client, 5)
        await bus.check_keeps(client, volatile)
    finally:
        await client.aclose()


async def test_a_server_without_an_append_only_file_is_refused_unless_that_is_wanted(tmp_path: Path) -> None:
    with helpers.running_redis(find_server(), tmp_path, append_only=False) as url:
        with pytest.raises(bus.UnfitRedis, match="appendonly yes.*--volatile"):
            await check(url)
        await check(url, volatile=True)


async def test_a_server_that_drops_keys_when_it_is_full_is_refused(redis_url: str) -> None:
    await check(redis_url)
    client = bus.connect(redis_url)
    try:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(bus.UnfitRedis, match="allkeys-lru.*noeviction"):
            await check(redis_url, volatile=True)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.aclose()


@pytest.mark.parametrize("user", ["gateway:wrong", "nobody:x"])
async def test_a_wrong_password_is_said_at_once(redis_url: str, user: str) -> None:
    with pytest.raises(bus.UnfitRedis, match="refuses this service"):
        await check(redis_url.replace("unix://", f"unix://{user}@"))


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_port(tmp_path: Path, certificates: Path) -> Iterator[int]:
    with tls_redis(tmp_path, certificates) as port:
        yield port


def address(port: int, **files: Path) -> str:
    environ = {f"HEADRACE_{name.upper()}": str(path) for name, path in files.items()}
    return load(CommonSettings, {"HEADRACE_REDIS_URL": f"rediss://localhost:{port}/0", **environ}).redis_address


async def test_tls_with_certificates_on_both_sides(tls_port: int, certificates: Path) -> None:
    ca = certificates / "ca.pem"
    key = certificates / "client.key"
    await check(address(tls_port, redis_ca_file=ca, redis_cert_file=certificates / "client.pem", redis_key_file=key))
    await check(address(tls_port, redis_ca_file=ca, redis_cert_file=certificates / "client.both"))


async def test_a_server_that_nobody_vouches_for_is_not_spoken_to(tls_port: int, certificates: Path) -> None:
    both = certificates / "client.both"
    with pytest.raises(bus.UnfitRedis, match="certificate|CERTIFICATE"):
        await check(address(tls_port, redis_cert_file=both))
    with pytest.raises(bus.UnfitRedis, match="certificate|CERTIFICATE"):
        await check(address(tls_port, redis_ca_file=certificates / "other-ca.pem", redis_cert_file=both))
    ca = certificates / "ca.pem"
    elsewhere = address(tls_port, redis_ca_file=ca, redis_cert_file=both).replace("localhost", "127.0.0.1")
    with pytest.raises(bus.UnfitRedis, match="127.0.0.1"):  # the certificate is not for that name
        await check(elsewhere)


async def test_a_service_without_a_certificate_is_not_served(tls_port: int, certificates: Path) -> None:
    client = bus.connect(address(tls_port, redis_ca_file=certificates / "ca.pem"))
    try:
        with pytest.raises(RedisError):
            await client.ping()
    finally:
        await client.aclose()


def test_files_without_tls_are_a_mistake() -> None:
    with pytest.raises(SettingsError, match="rediss://"):
        load(CommonSettings, {"HEADRACE_REDIS_CA_FILE": "ca.pem"})
    with pytest.raises(SettingsError, match="redis_key_file: cannot be read"):
        address(1, redis_key_file=Path("/nowhere/key.pem"))
    assert address(1) == "rediss://localhost:1/0"
