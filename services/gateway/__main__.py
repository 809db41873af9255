"""Starts a gateway: `python -m services.gateway`, configured by the environment."""

from __future__ import annotations

import logging
import sys

from services.gateway import byte_tokenizer, chat_template
from services.gateway.http_server import UnsafeParser, check_parser
from services.gateway.service import CannotListen, GatewayService
from services.gateway.tokenization import Tokenizer, TokenizerError
from shared import bootstrap, bus, model_source
from shared.runtime import EXIT_CONFIG, Stop, redis_answers
from shared.settings import SCRIPTED_MODEL, CommonSettings, GatewaySettings

log = logging.getLogger("gateway")


def load_tokenizer(common: CommonSettings) -> Tokenizer:
    """The served model's; ValueError with one sentence for the operator where there is none."""
    if common.model == SCRIPTED_MODEL:
        return byte_tokenizer.byte_tokenizer()
    tokenizer = Tokenizer.from_source(model_source.resolve(common.model, common.cache_dir))
    if tokenizer.chat_template is not None:
        chat_template.check(tokenizer.chat_template)
    return tokenizer


async def serve(stop: Stop, common: CommonSettings, own: GatewaySettings) -> int:
    try:
        check_parser()
        tokenizer = load_tokenizer(common)
    except (UnsafeParser, model_source.ModelSourceError, TokenizerError, chat_template.ChatTemplateError) as e:
        log.error("%s", e)
        return EXIT_CONFIG
    redis = bus.connect(common.redis_address)
    try:
        if not await redis_answers(redis, stop, volatile=common.volatile):
            return 0
        await GatewayService(redis, tokenizer, common, own).run(stop)
    except CannotListen as e:
        log.error("%s", e)
        return 1
    finally:
        await redis.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(bootstrap.start("gateway", serve))
