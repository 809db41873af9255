"""Starts a gateway: `python -m services.gateway`, configured by the environment."""

from __future__ import annotations

import logging
import sys

from services.gateway import byte_tokenizer
from services.gateway.chat_template import ChatTemplateError
from services.gateway.http_server import UnsafeParser, check_parser
from services.gateway.service import CannotListen, GatewayService
from services.gateway.tokenization import Tokenizer, TokenizerError
from shared import bootstrap, bus, model_source
from shared.runtime import EXIT_CONFIG, Stop, redis_answers
from shared.settings import SCRIPTED_MODEL, CommonSettings, GatewaySettings, LimitSettings

log = logging.getLogger("gateway")


def load_tokenizer(common: CommonSettings) -> Tokenizer:
    """The served model's; ValueError with one sentence for the operator where there is none."""
    if common.model == SCRIPTED_MODEL:
        return byte_tokenizer.byte_tokenizer()
    return Tokenizer.from_source(model_source.resolve(common.model, common.cache_dir))


async def serve(stop: Stop, common: CommonSettings, own: GatewaySettings, limits: LimitSettings) -> int:
    try:
        check_parser()
        tokenizer = load_tokenizer(common)
    except (UnsafeParser, model_source.ModelSourceError, TokenizerError) as e:
        log.error("%s", e)
        return EXIT_CONFIG
    redis = bus.connect(common.redis_address)
    try:
        if not await redis_answers(redis, stop, volatile=common.volatile):
            return 0
        service = GatewayService(redis, tokenizer, common, own, limits)
        await service.intake.start()
        await service.run(stop)
    except ChatTemplateError as e:
        log.error("%s", e)
        return EXIT_CONFIG
    except CannotListen as e:
        log.error("%s", e)
        return 1
    finally:
        await redis.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(bootstrap.start("gateway", serve))
