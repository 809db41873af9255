"""Renders chat templates in a process that its gateway can kill: `python -m services.gateway.template_process`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime

from services.gateway import chat_template, child_process
from services.gateway.chat_template import ChatTemplateError
from services.gateway.child_process import Answer, Frame


def open_(first: Frame) -> tuple[Frame, Answer]:
    source, special_tokens = first["source"], first["special_tokens"]

    def check() -> str:
        chat_template.check(source)
        return ""

    def render(call: Frame) -> Frame:
        now = datetime.fromisoformat(call["now"])
        return _text(
            lambda: chat_template.render(
                source, call["messages"], now=now, special_tokens=special_tokens, **call["options"]
            )
        )

    return _text(check), render


def _text(render: Callable[[], str]) -> Frame:
    try:
        return {"text": render()}
    except ChatTemplateError as e:
        return {"error": e.message}


if __name__ == "__main__":
    child_process.run(sys.stdin.buffer, sys.stdout.buffer, open_)
