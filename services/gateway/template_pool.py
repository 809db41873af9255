"""Renders chat templates outside of this process.

A template is code from a model's files, run on what clients send, and no sandbox bounds its time. What is rendered, and
how, is `chat_template.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from services.gateway.chat_template import CANNOT_RENDER, MAX_OUTPUT_CHARS, ChatTemplateError, Message
from services.gateway.child_pool import ANSWER_TIMEOUT_S, MAX_CPU_S, ChildPool
from services.gateway.child_process import encode_frame


class TemplatePool(ChildPool):
    """For one template, that of the served model."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], render_timeout_s: float = ANSWER_TIMEOUT_S,
        max_cpu_s: float = MAX_CPU_S,
    ) -> None:  # fmt: skip
        super().__init__(
            "services.gateway.template_process", {"source": source, "special_tokens": dict(special_tokens)},
            what="chat templates", max_answer_chars=MAX_OUTPUT_CHARS, timeout_s=render_timeout_s, max_cpu_s=max_cpu_s,
            error=partial(ChatTemplateError, param="messages"), failed=CANNOT_RENDER,
            too_slow="the model's chat template takes too long for these messages",
            too_long="the chat template's text is too long",
        )  # fmt: skip

    async def start(self) -> None:
        """The first child, so that no request waits for it; ChatTemplateError if the template does not compile."""
        text_of(await self.start_one())

    async def render(self, call: bytes) -> bytes:
        """From `encode_call` to what `text_of` takes, since both may take long for a long conversation. As `ask`."""
        return await self.ask(call)


def encode_call(messages: Sequence[Message], now: datetime, **options: Any) -> bytes:
    """options: of `chat_template.render`, beside its special tokens."""
    return encode_frame({"messages": list(messages), "now": now.isoformat(), "options": options})


def text_of(answer: bytes) -> str:
    """The prompt's text; ChatTemplateError where the template has none for these messages."""
    fields = json.loads(answer)
    if "error" in fields:
        raise ChatTemplateError(str(fields["error"]), param="messages")
    return str(fields["text"])
