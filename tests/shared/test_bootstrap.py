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
