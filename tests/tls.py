"""A Redis that speaks TLS alone, and the certificates for it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.embedded_redis import find_server
from tests import helpers


def make_certificates(folder: Path) -> Path:
    """ca, server (for localhost), client, and other-ca, each as .pem and .key; client.both has both in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    for ca in ("ca", "other-ca"):
        openssl(folder, f"req -x509 -newkey ed25519 -nodes -days 2 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem")
    for name in ("server", "client"):
        openssl(
            folder,
            f"req -newkey ed25519 -nodes -subj /CN={name} -addext subjectAltName=DNS:localhost"
            f" -keyout {name}.key -out {name}.csr",
        )
        openssl(
            folder,
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
            f" -copy_extensions copy -out {name}.pem",
        )
    both = (folder / "client.pem").read_text() + (folder / "client.key").read_text()
    (folder / "client.both").write_text(both)
    return folder


def openssl(folder: Path, command: str) -> None:
    done = subprocess.run(["openssl", *command.split()], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def tls_redis(folder: Path, certificates: Path) -> Iterator[int]:
    """A server that speaks TLS alone, to clients with a certificate; its port."""
    folder.mkdir(parents=True, exist_ok=True)
    port = helpers.free_port()
    log = folder / "redis.log"
    log.touch()
    command = [
        str(find_server().program), "--port", "0", "--tls-port", str(port), "--dir", str(folder), "--logfile", str(log),
        "--appendonly", "yes", "--aclfile", str(helpers.write_users(folder)),
        "--tls-cert-file", str(certificates / "server.pem"), "--tls-key-file", str(certificates / "server.key"),
        "--tls-ca-cert-file", str(certificates / "ca.pem"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            helpers.wait_until_sync(lambda: process.poll() is not None or "Ready to accept" in log.read_text())
            if process.poll() is not None:
                pytest.skip("this Redis was built without TLS")
            yield port
        finally:
            process.terminate()
