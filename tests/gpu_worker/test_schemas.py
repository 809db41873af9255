"""Answers by 300 schemas over all supported keywords are valid whenever they end: judged by a validator of its own."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema_rs
import pytest

from services.gateway.schema_formats import FORMATS
from services.gpu_worker.grammar import Grammars
from shared.model_source import ModelSource
from shared.protocol import Constraint
from shared.scripted_vocab import EOS
from shared.vocabulary import read_vocabulary
from tests.bench import schema_suite
from tests.gpu_worker.any_engine import load_native
from tests.gpu_worker.schemas import NUM_SCHEMAS, RETOLD, SUITE, constraint_of, keywords_of, own_schemas, suite_cases
from tests.gpu_worker.test_default_model import model_path
from tests.gpu_worker.test_default_model_grammar import EOS as MODEL_EOS
from tests.gpu_worker.test_default_model_grammar import PROMPT
from tests.gpu_worker.test_grammar import answer, begin, ids
from tests.gpu_worker.tiny_models import Runner, next_chunk

MAX_TOKENS = 160
MAX_MODEL_TOKENS = 96
NUM_TOGETHER = 20
KEYWORDS = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "items",
    "prefixItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
    "pattern", "format", "minItems", "maxItems", "minProperties", "maxProperties", "anyOf", "allOf", "oneOf", "$ref",
    "$defs", "definitions", "title", "description",
}  # fmt: skip


def is_valid(schema: Any, text: str) -> bool:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    return bool(validator.is_valid(json.loads(text)))


def drawn(constraint: Constraint, seed: int) -> str | None:
    """What somebody writes who takes any allowed byte, and the end as soon as there is one; None: it has no end."""
    chance = random.Random(seed)
    tokens = answer(begin(constraint), lambda allowed: EOS if EOS in allowed else chance.choice(allowed), MAX_TOKENS)
    return bytes(tokens[:-1]).decode() if tokens[-1] == EOS else None


def check_drawn(schemas: list[tuple[int, Any]]) -> int:
    """How many answers have ended."""
    num_ended = 0
    for seed, schema in schemas:
        constraint = constraint_of(schema)
        assert constraint is not None, schema
        text = drawn(constraint, seed)
        num_ended += text is not None
        assert text is None or is_valid(schema, text), (schema, text)
    return num_ended


def test_every_supported_keyword_is_there() -> None:
    assert len(own_schemas()) == NUM_SCHEMAS
    assert keywords_of(own_schemas()) >= KEYWORDS


def test_random_answers_by_some_schemas() -> None:
    some = list(enumerate(own_schemas()))[::4]
    assert check_drawn(some) > 0.7 * len(some)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_answers_by_all_schemas() -> None:
    several = [(seed, schema) for seed in range(3) for schema in own_schemas()]
    assert check_drawn(several) > 0.7 * len(several)


def complete(constraint: Constraint, text: str) -> bool:
    """Whether the text may be written, and end there."""
    state = begin(constraint)
    for byte in text.encode():
        if byte not in ids(state.mask()):
            return False
        state.accept(byte)
    return EOS in ids(state.mask())


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), RETOLD, ids=lambda value: json.dumps(value)[:60])
def test_what_is_told_in_other_keywords_means_the_same(schema: Any, allowed: list[Any], forbidden: list[Any]) -> None:
    judge = jsonschema_rs.validator_for({k: v for k, v in schema.items() if "dialect" not in str(v)})
    assert all(map(judge.is_valid, allowed)) and not any(map(judge.is_valid, forbidden))
    constraint = constraint_of(schema)
    assert constraint is not None
    written = [(value, complete(constraint, json.dumps(value, ensure_ascii=False))) for value in allowed + forbidden]
    assert written == [(value, i < len(allowed)) for i, value in enumerate(allowed + forbidden)]
    for seed in range(5):
        text = drawn(constraint, seed)
        assert text is None or judge.is_valid(json.loads(text)), text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(SUITE not in os.environ, reason=f"{SUITE} names no copy of the JSON Schema Test Suite")
def test_a_public_suite() -> None:
    """What its schemas forbid cannot be written; what is written at random is valid."""
    num_schemas = num_ended = 0
    for seed, (place, schema, invalid) in enumerate(suite_cases()):
        constraint = constraint_of(schema)
        if constraint is None:
            continue
        num_schemas += 1
        for value in invalid:
            assert not complete(constraint, json.dumps(value, ensure_ascii=False)), (place, value)
        text = drawn(constraint, seed)
        num_ended += text is not None
        assert text is None or schema_suite.is_valid(place, schema, text), (place, schema, text)
    assert num_schemas > 270 and num_ended >= 0.7 * num_schemas


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_the_default_model_at_temperature_1() -> None:
    engine = load_native(model_path(), kv_cache_bytes=1 << 28)
    words = read_vocabulary(ModelSource("default", model_path(), "gguf"))
    grammars = Grammars(lambda: words)
    runner, schemas, num_ended = Runner(engine), own_schemas(), 0
    for first in range(0, len(schemas), NUM_TOGETHER):
        batch = []
        for number, schema in enumerate(schemas[first : first + NUM_TOGETHER], first):
            rules = constraint_of(schema)
            assert rules is not None
            sequence = runner.sequence(PROMPT, MAX_MODEL_TOKENS, temperature=1.0, seed=number, constraint=rules)
            sequence.answer = grammars.begin(rules, [MODEL_EOS])
            batch.append((schema, sequence))
        open_ones = [sequence for _, sequence in batch]
        while open_ones:
            runner.step([next_chunk(sequence, 512) for sequence in open_ones])
            open_ones = [s for s in open_ones
                         if s.token_ids[-1] != MODEL_EOS and s.num_output_tokens < MAX_MODEL_TOKENS]  # fmt: skip
        for schema, sequence in batch:
            runner.free(sequence)
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            if output[-1] == MODEL_EOS:
                text = b"".join(words.tokens[i] for i in output[:-1]).decode()
                assert is_valid(schema, text), (schema, text)
                num_ended += 1
    assert num_ended > 0.6 * len(schemas)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_validators(name: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": name}}, "required": ["x"]}
    constraint = constraint_of(schema | {"additionalProperties": False})
    assert constraint is not None
    texts = [text for seed in range(40) if (text := drawn(constraint, seed)) is not None]
    assert len(texts) > 10
    assert [text for text in texts if not is_valid(schema, text)] == []


def test_what_a_schema_forbids_cannot_be_written() -> None:
    """A few of each keyword's; the suite has many."""
    for schema, value in (
        ({"type": "integer", "maximum": 9}, 10), ({"type": "string", "maxLength": 2}, "abc"), ({"enum": [1]}, "1"),
        ({"type": "string", "maxLength": 2.0}, "abc"),
        ({"type": "array", "items": {"type": "integer"}}, ["x"]), ({"type": "object", "required": ["a"]}, {}),
        ({"type": "string", "format": "date"}, "2024-13-01"), ({"multipleOf": 5, "type": "integer"}, 7),
        ({"type": "integer", "format": "int32"}, 1 << 31), ({"type": "integer", "format": "int64"}, 1 << 63),
        ({"type": "object", "additionalProperties": False}, {"a": 1}), ({"type": "array", "minItems": 1}, []),
    ):  # fmt: skip
        constraint = constraint_of(schema)
        assert constraint is not None and not complete(constraint, json.dumps(value)), schema


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "null"}}},
        {"properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": {"type": "integer"}},
        {"not": {"required": ["a"]}},
        {"dependentRequired": {"a": ["b"]}},
        {"anyOf": [{"$ref": "#/$defs/o"}], "$defs": {"o": {"properties": {"a": False}}}},
        {"properties": {"a": False}, "minProperties": 1},
    ],
    ids=str,
)
def test_no_name_escapes_its_schema_by_another_spelling(schema: Any) -> None:
    for prefix, suffix, inner in (("", "", schema), ("[", "]", {"items": {"type": "object"} | schema})):
        inner = inner | {"$defs": schema["$defs"]} if "$defs" in schema else inner
        constraint = constraint_of(inner)
        assert constraint is not None
        for name in ("\\u0061", "a"):
            for text in (f'{{"{name}":1}}', f'{{"a":null,"{name}":1}}'):
                assert not complete(constraint, prefix + text + suffix), text
        others = '{"a":null,"b\\n\\u0001\\"é":1}' if "required" in schema else '{"b\\n\\u0001\\"é":1}'
        assert complete(constraint, prefix + others + suffix)
