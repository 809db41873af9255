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
        await client.config_set("maxmemory", 1 << 30)
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


def address(port: int, folder: Path | None = None) -> str:
    environ = {"HEADRACE_REDIS_TLS_DIR": str(folder)} if folder else {}
    return load(CommonSettings, {"HEADRACE_REDIS_URL": f"rediss://localhost:{port}/0", **environ}).redis_address


async def test_tls_with_certificates_on_both_sides(tls_port: int, certificates: Path) -> None:
    await check(address(tls_port, certificates))


async def test_a_key_may_be_in_the_certificate_s_file(tls_port: int, certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes((certificates / "ca.pem").read_bytes())
    (tmp_path / "client.pem").write_bytes((certificates / "client.both").read_bytes())
    await check(address(tls_port, tmp_path))


async def test_a_server_that_nobody_vouches_for_is_not_spoken_to(tls_port: int, certificates: Path) -> None:
    with pytest.raises(bus.UnfitRedis, match="certificate|CERTIFICATE"):
        await check(address(tls_port))
    other = address(tls_port, certificates).replace("ca.pem", "other-ca.pem")
    with pytest.raises(bus.UnfitRedis, match="certificate|CERTIFICATE"):
        await check(other)
    elsewhere = address(tls_port, certificates).replace("localhost", "127.0.0.1")
    with pytest.raises(bus.UnfitRedis, match="127.0.0.1"):  # the certificate is not for that name
        await check(elsewhere)


async def test_a_service_without_a_certificate_is_not_served(tls_port: int, certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes((certificates / "ca.pem").read_bytes())
    client = bus.connect(address(tls_port, tmp_path))
    try:
        with pytest.raises(RedisError):
            await client.ping()
    finally:
        await client.aclose()


def test_a_folder_that_cannot_be_used_is_a_mistake(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="rediss://"):
        load(CommonSettings, {"HEADRACE_REDIS_TLS_DIR": str(certificates)})
    with pytest.raises(SettingsError, match="redis_tls_dir: has neither ca.pem nor client.pem"):
        address(1, tmp_path)
    assert address(1) == "rediss://localhost:1/0"
