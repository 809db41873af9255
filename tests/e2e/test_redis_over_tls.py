"""All services on a Redis that speaks TLS alone, each as its own user."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.clients import Connect
from tests.e2e.load import plain, words
from tests.e2e.stack import NewStack
from tests.helpers import refused_by
from tests.tls import make_certificates, tls_redis


async def test_a_stack_over_tls(new_stack: NewStack, connect: Connect, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with tls_redis(tmp_path / "redis", certificates) as port:
        files = f"ssl_ca_certs={certificates / 'ca.pem'}&ssl_certfile={certificates / 'client.both'}"
        url = f"rediss://localhost:{port}/0?{files}"
        async with new_stack(redis_url=url) as stack:
            answer = await connect(stack.url).ask(plain("over TLS", 20))
            answer.check()
            assert answer.text == words("over TLS", 20)
        assert refused_by(url) == []
