"""What compose.yaml starts as Redis: the users' rights with passwords from the environment, by a real server."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared import redis_acl
from shared.scripts import Scripts
from tests.helpers import wait_until, wait_until_sync
from tests.shared.script_world import MODEL, World

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "redis"


def made_secrets() -> dict[str, str]:
    lines = subprocess.run([FOLDER / "make-secrets"], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def secrets() -> dict[str, str]:
    return made_secrets()


@pytest.fixture
def socket(secrets: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    with started(secrets, tmp_path) as process:
        try:
            wait_until_sync((tmp_path / "s").exists)
            yield tmp_path / "s"
        finally:
            process.terminate()


def started(secrets: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    command = [str(FOLDER / "start"), "--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder),
               "--logfile", str(folder / "log"), "--appendonly yes"]  # fmt: skip
    return subprocess.Popen(command, env={"PATH": os.environ["PATH"], "TMPDIR": str(folder)} | secrets)


def test_secrets_differ_from_each_other_and_each_time(secrets: dict[str, str]) -> None:
    both = [*secrets.values(), *made_secrets().values()]
    assert len(set(both)) == len(both) == 2 * (len(redis_acl.USERS) + 1)
    assert all(re.fullmatch(r"[0-9a-f]{48}", secret) for secret in both)


def test_each_user_has_its_own_password(socket: Path, secrets: dict[str, str]) -> None:
    for user in redis_acl.USERS:
        for variable, password in secrets.items():
            once = Retry(NoBackoff(), 0)
            with redis.Redis(unix_socket_path=str(socket), username=user.name, password=password, retry=once) as client:
                if variable == "REDIS_PASSWORD_" + user.name.upper().replace("-", "_"):
                    assert client.ping()
                else:
                    with pytest.raises(redis.ConnectionError, match="username-password"):
                        client.ping()
    text = "".join(path.read_text() for path in socket.parent.glob("tmp.*"))
    assert not any(secret in text for secret in secrets.values())


def test_no_server_starts_while_a_user_has_no_password(secrets: dict[str, str], tmp_path: Path) -> None:
    del secrets["REDIS_PASSWORD_CACHE_STORE"]
    with started(secrets, tmp_path) as process:
        assert process.wait(10) != 0
    assert "#@cache-store@" in (tmp_path / "log").read_text() or "ACL" in (tmp_path / "log").read_text()


def test_compose_gives_each_service_only_its_own_password() -> None:
    text = (ROOT / "compose.yaml").read_text()
    sections = dict(re.findall(r"^  ([\w-]+):\n((?:    .*\n|\n)+)", text.partition("\nservices:\n")[2], re.MULTILINE))
    users = {"gateway": "GATEWAY", "scheduler": "SCHEDULER", "cache-store": "CACHE_STORE", "gpu-worker": "WORKER"}
    for service, section in sections.items():
        found = set(re.findall(r"\$\{REDIS_PASSWORD_(\w+)", section))
        if service != "redis":
            assert found == ({users[service]} if service in users else set()), service
    assert "REDIS_PASSWORD" not in text.partition("\nservices:\n")[0]


def test_compose_starts_without_passwords_of_ones_own() -> None:
    uses = re.findall(r"\$\{REDIS_PASSWORD_\w+(.*?)\}", (ROOT / "compose.yaml").read_text())
    assert uses and set(uses) == {":-inside"}


async def test_what_scripts_wrote_is_there_after_a_crash(secrets: dict[str, str], tmp_path: Path) -> None:
    """Redis reads its file back as the user `default`, with that user's rights: without them it drops every
    transaction, and so all that scripts wrote."""
    name, password = "gateway", secrets["REDIS_PASSWORD_GATEWAY"]
    path = str(tmp_path / "s")
    for status in ("ok", "exists"):
        with started(secrets, tmp_path) as process:
            try:
                wait_until_sync((tmp_path / "s").exists)
                async with AsyncRedis(unix_socket_path=path, username=name, password=password) as client:
                    await wait_until(lambda client=client: answers(client))
                    assert (await World(client, Scripts(client, MODEL)).admit("r"))[0] == status
            finally:
                process.kill()
        (tmp_path / "s").unlink()


async def answers(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except redis.exceptions.RedisError:
        return False
