"""From the environment to a running service: settings, logging, a touched heartbeat file, an exit status.

Every service's `__main__` is a call of `start`. What the service does is its own business.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from shared import crash_points, logs, runtime, settings
from shared.bus import NoRedis, UnfitRedis
from shared.runtime import EXIT_CONFIG, Stop
from shared.settings import CommonSettings, Section, SettingsError

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0

Service = Callable[..., Coroutine[Any, Any, int]]


def start(name: str, service: Service) -> int:
    """Loads the sections of `settings.SERVICE_SECTIONS[name]` and runs service(stop, *sections) to its end.

    The exit status: the service's own; EXIT_CONFIG after one sentence when a setting or the Redis cannot be used, 1
    after one when there is no Redis.
    """
    try:
        sections = [settings.load(section) for section in settings.SERVICE_SECTIONS[name]]
    except SettingsError as e:
        sys.stderr.write(f"headrace {name.replace('_', '-')}: {e}\n")
        return EXIT_CONFIG
    common = sections[0]
    assert isinstance(common, CommonSettings)
    logs.set_up(name, common.log_level, common.log_format, settings.secret_values(*sections))
    crash_points.arm(common.crash_at)
    if common.redis_is_open:
        log.warning("Redis is used without a password over a network: whoever reaches it can do all that services do")
    for section in sections:
        log.debug("%s", settings.describe(section))
    try:
        return runtime.main(lambda stop: _with_heartbeat(service, stop, common, sections))
    except (SettingsError, UnfitRedis) as e:
        log.error("%s", e)
        return EXIT_CONFIG
    except NoRedis as e:
        log.error("%s", e)
        return 1


async def _with_heartbeat(service: Service, stop: Stop, common: CommonSettings, sections: list[Section]) -> int:
    if common.heartbeat_file:
        _touch(asyncio.get_running_loop(), Path(common.heartbeat_file))
    return await service(stop, *sections)


def _touch(loop: asyncio.AbstractEventLoop, path: Path) -> None:
    """From the loop itself: a loop that is stuck does not touch the file."""
    path.touch()
    loop.call_later(HEARTBEAT_S, _touch, loop, path)
