"""docs/http.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.gateway import body, chat_messages, generation, http_server, json_reader, openapi
from services.gateway import openai_schema as schema
from services.gateway.errors import TYPES
from services.gateway.open_request import MAX_QUEUED_BYTES
from shared.settings import GatewaySettings, LimitSettings

TEXT = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
LIMIT = {name: field.default for name, field in LimitSettings.model_fields.items()}
DEFAULT = {name: field.default for name, field in GatewaySettings.model_fields.items()}


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        ("a body |", [DEFAULT["max_body_bytes"] >> 20]),
        ("all bodies that are being read", [body.MAX_BODIES]),
        ("JSON", [json_reader.MAX_DEPTH, json_reader.MAX_CONTAINERS, json_reader.MAX_NUMBER_CHARS]),
        ("the head of a request |", [http_server.MAX_HEADER_BYTES, http_server.MAX_HEADERS]),
        ("choices", [DEFAULT["max_num_choices"]]),
        ("stop strings", [schema.MAX_STOPS, schema.MAX_STOP_CHARS, schema.MAX_STOP_IDS]),
        ("`logit_bias`", [schema.MAX_BIASES]),
        ("`logprobs`", [schema.MAX_LOGPROBS]),
        ("`messages`", [schema.MAX_MESSAGES, chat_messages.MAX_PARTS, chat_messages.MAX_TOOL_CALLS]),
        ("the head of a request, and silence", [http_server.KEEP_ALIVE_S]),
        ("a body, from its head", [body.BODY_TIMEOUT_S]),
        ("an answer", [DEFAULT["request_timeout_s"]]),
        ("a client that does not take", [LIMIT["send_timeout_s"]]),
        ("open connections", [http_server.RESERVED_FILES]),
        ("what waits to be sent", [http_server.SEND_BUFFER_BYTES >> 10, MAX_QUEUED_BYTES >> 10]),
        ("silence in a stream", [generation.TICK_S]),
    ],
)
def test_bounds_and_times(row: str, numbers: list[float]) -> None:
    [line] = [line for line in TEXT.splitlines() if line.startswith(f"| {row}")]
    for number in numbers:
        assert re.search(rf"\b{number:g}\b", line), (number, line)


def test_every_code_of_a_deadline_is_explained() -> None:
    late = {code for code, status in generation.STATUS_OF_CODE.items() if status == 504}
    assert late == {
        line.split("`")[1] for line in TEXT.splitlines() if "_timeout` |" in line or "`timeout` |" in line
    } | {"deadline_exceeded"}


def test_every_status_is_explained() -> None:
    firsts = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| ")]
    explained = {int(word) for cell in firsts for word in cell.replace(",", " ").split() if word.isdigit()}
    assert set(TYPES) | set(openapi.GENERATING) | set(openapi.READING) <= explained
