"""The default model held to a grammar: each engine's answers are valid, and those that it gives one at a time."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from services.gateway import structured
from services.gpu_worker.grammar import Grammars
from shared.model_source import ModelSource
from shared.protocol import Constraint
from shared.vocabulary import read_vocabulary
from tests.gpu_worker.any_engine import AnyEngine, load_native, load_torch
from tests.gpu_worker.test_default_model import model_path
from tests.gpu_worker.tiny_models import Runner

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
PROMPT = [1, 4093, 198, 28, 253, 1444, 30, 2, 198, 1, 520, 9531, 198]
EOS = 2
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.9, "logprobs": 2},
]  # fmt: skip


@pytest.mark.parametrize("load", [load_native, pytest.param(load_torch, marks=pytest.mark.slow)])
def test_answers_are_valid_and_do_not_depend_on_their_company(load: Any) -> None:
    engine: AnyEngine = load(model_path(), kv_cache_bytes=1 << 28)
    words = read_vocabulary(ModelSource("default", model_path(), "gguf"))
    grammars, num_tokens = Grammars(lambda: words), 24
    rules = Constraint(grammar=structured.json_wanted(SCHEMA, "schema", compact=True).grammar, json_text=True)

    def answers(draws: list[dict[str, Any]]) -> list[list[int]]:
        runner = Runner(engine)
        sequences = [
            runner.sequence(PROMPT, num_tokens, constraint=rules, stop_token_ids=(EOS,), **draw) for draw in draws
        ]
        for sequence in sequences:
            sequence.answer = grammars.begin(rules, [EOS])
        results = runner.run(sequences)
        return [[token.token_id for token in result] for result in results]

    together = answers(DRAWS)
    for draw, ids in zip(DRAWS, together, strict=True):
        assert EOS in ids, "nothing but the end follows, and it is drawn"
        text = b"".join(words.tokens[i] for i in ids[: ids.index(EOS)]).decode()
        assert jsonschema_rs.validator_for(SCHEMA).is_valid(json.loads(text)), text
        assert answers([draw])[0] == ids
