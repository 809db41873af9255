"""What a service's process says and returns when it cannot begin."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from shared import bootstrap
from shared.bus import NoRedis, UnfitRedis
from shared.runtime import EXIT_CONFIG, Stop
from shared.settings import CommonSettings, SchedulerSettings, SettingsError


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_redis_that_is_open_to_others_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(stop: Stop, common: CommonSettings, own: SchedulerSettings) -> int:
        return 0

    for url, warns in (("redis://db/0", True), ("redis://scheduler:x@db/0", False)):
        monkeypatch.setenv("HEADRACE_REDIS_URL", url)
        assert bootstrap.start("scheduler", serve) == 0
        assert ("without a password" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    "error, status",
    [
        (NoRedis("Redis does not answer"), 1),
        (SettingsError("that is wrong"), EXIT_CONFIG),
        (UnfitRedis("Redis keeps nothing"), EXIT_CONFIG),
    ],
)
def test_what_keeps_it_from_serving_is_one_sentence(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(stop: Stop, common: CommonSettings, own: SchedulerSettings) -> int:
        raise error

    assert bootstrap.start("scheduler", serve) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].endswith(str(error))
