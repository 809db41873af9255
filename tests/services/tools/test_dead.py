"""`headrace dead`: what it shows of a request that workers died of, and what a retry is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.tools import dead
from shared.embedded_redis import socket_path
from shared.protocol import Outcome
from shared.settings import CommonSettings
from shared.wire import encode
from tests.helpers import wait_until
from tests.shared.script_world import MODEL, entry, world_at

POISON = Outcome(reason="error", code="poison_request", message="3 workers died while running this request")
LENGTH = encode(Outcome(reason="length", num_tokens=2))


@pytest.fixture(autouse=True)
def settings(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", redis_url)
    monkeypatch.setenv("HEADRACE_SERVED_MODEL_NAME", MODEL)


def with_a_dead_request(redis_url: str) -> None:
    async def make() -> None:
        async with world_at(redis_url) as w:
            await w.placed("r")
            await w.commit(entry("r.0", count=2))
            await w.scripts.condemn("r.0", 1, POISON, POISON.message, 3)

    asyncio.run(make())


def test_nothing_is_dead(capsys: pytest.CaptureFixture[str]) -> None:
    assert dead.main(["list"]) == 0
    assert "No request" in capsys.readouterr().out
    assert dead.main(["show", "x.0"]) == 1
    assert "x.0 is not among" in capsys.readouterr().err


def test_what_is_dead_is_listed_and_shown_without_its_text(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with_a_dead_request(redis_url)
    assert dead.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "r.0  3 workers died while running this request; can be retried" in listed
    for id in ("r", "r.0"):
        assert dead.main(["show", id]) == 0
        shown = capsys.readouterr().out
        for text in ("choice 0 of request r", "output tokens  2", "prompt tokens  3", '"max_tokens":8', "kept for"):
            assert text in shown, shown


@pytest.fixture
def worker(redis_url: str) -> Iterator[list[str]]:
    """Ends whatever is queued after a request has died; the sequences that it ended."""
    with_a_dead_request(redis_url)
    ended: list[str] = []
    stop = threading.Event()

    async def serve() -> None:
        async with world_at(redis_url) as w:
            while not stop.is_set():
                await asyncio.sleep(0.01)
                for sid, epoch in await w.queue():
                    record = await w.sequence(sid)
                    assert (record.strikes, record.gateway) == (3, "")
                    await w.scripts.assign(sid, epoch, "w", 1, b"admit")
                    await w.commit(entry(sid, epoch + 1, count=2, outcome=LENGTH))
                    ended.append(sid)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield ended
    stop.set()
    thread.join(10)


def test_a_retry_runs_it_as_another_request_and_says_how_that_ended(
    worker: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dead.main(["retry", "r.0"]) == 0
    output = capsys.readouterr().out
    (sid,) = worker
    assert sid != "r.0" and f"runs again as request {sid[:-2]}" in output
    assert f"{sid} ended after 2 tokens: length" in output


def test_a_retry_needs_the_record(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with_a_dead_request(redis_url)

    async def expire() -> None:
        async with world_at(redis_url) as w:
            await w.redis.delete(w.key("r:r"))
            await wait_until(lambda: w.exists("dead"))

    asyncio.run(expire())
    assert dead.main(["list"]) == 0 and "record expired" in capsys.readouterr().out
    assert dead.main(["retry", "r"]) == 1
    assert "has expired" in capsys.readouterr().err


def test_an_id_belongs_to_show_and_retry(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["list", "x"], ["show"], ["retry"], ["bury", "x"]):
        with pytest.raises(SystemExit):
            dead.main(argv)
    assert "needs an ID" in capsys.readouterr().err


def test_without_an_address_it_is_the_redis_of_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_REDIS_URL")
    common = CommonSettings(state_dir=tmp_path)
    assert dead.redis_url_of(common) == common.redis_url
    socket_path(tmp_path).touch()
    assert dead.redis_url_of(common) == f"unix://{socket_path(tmp_path)}"
    given = CommonSettings(state_dir=tmp_path, redis_url="redis://db:1/0")
    assert dead.redis_url_of(given) == "redis://db:1/0"
