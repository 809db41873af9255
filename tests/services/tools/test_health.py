"""The health check of containers."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.tools import health
from tests.helpers import free_port


def test_a_heartbeat_is_healthy_while_it_is_fresh(tmp_path: Path) -> None:
    beat = tmp_path / "alive"
    beat.touch()
    os.utime(beat, (1000.0, 1000.0))
    assert health.why_unhealthy(str(beat), 1000.0 + health.MAX_AGE_S) == ""
    assert "was touched 25 s ago" in health.why_unhealthy(str(beat), 1025.0)
    assert "No such file" in health.why_unhealthy(str(tmp_path / "none"), 0.0)


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ready" else 503)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_service_is_healthy_when_it_answers_200(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main([f"{server}/ready"]) == 0
    assert health.main([f"{server}/other"]) == 1
    assert "503" in capsys.readouterr().err
    assert health.main([f"http://127.0.0.1:{free_port()}/ready"]) == 1
