from __future__ import annotations

import pytest

from shared import settings, speculative_config
from shared.settings import WorkerSettings
from shared.speculative_config import SpeculativeConfig


def parse(text: str) -> SpeculativeConfig | None:
    """What does not depend on the engine."""
    found = speculative_config.parse(text, is_native=False)
    assert found == speculative_config.parse(text, is_native=True)
    return found


def test_by_default_auto_guesses_where_the_engine_is_native() -> None:
    text = settings.load(WorkerSettings, {}).speculative_config
    assert text == "auto"
    assert speculative_config.parse(text, is_native=True) == SpeculativeConfig(method="auto")
    assert speculative_config.parse(text, is_native=False) is None


def test_methods_and_their_defaults() -> None:
    assert parse("none") is None
    assert parse('{"method": "suffix"}') == SpeculativeConfig(method="suffix", num_speculative_tokens=16)
    assert parse('{"method": "auto"}') == SpeculativeConfig(method="auto", num_speculative_tokens=16, fleet=True)
    off = parse('{"method": "suffix", "fleet": false}')
    assert off is not None and not off.fleet
    got = parse('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}')
    drafted = parse('{"method": "draft_model", "model": "hf:org/small", "quantization": "int8"}')
    assert drafted is not None and (drafted.model, drafted.quantization) == ("hf:org/small", "int8")
    assert got is not None and (got.num_speculative_tokens, got.prompt_lookup_min, got.prompt_lookup_max) == (3, 1, 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("suffix", "must be auto, none or a JSON object like"),
        ("[]", "must be auto, none or a JSON object like"),
        ("", "must be auto, none or a JSON object like"),
        ("{}", "method: is missing"),
        ('{"method": "auto", "model": "x"}', "model: only draft_model, medusa, eagle, eagle3 have it"),
        ('{"method": "eagle"}', "model: is missing"),
        ('{"method": "medusa"}', "model: is missing"),
        ('{"method": "eagle", "model": "x", "quantization": "int8"}', "quantization: only the method draft_model has"),
        ('{"method": "eagle", "model": "x", "fleet": true}', "fleet: the method eagle does not have it"),
        ('{"method": "draft_model"}', "model: is missing"),
        ('{"method": "draft_model", "model": "x", "fleet": true}', "fleet: the method draft_model does not have it"),
        ('{"method": "draft_model", "model": ""}', "model: is missing"),
        ('{"method": "draft_model", "model": 3}', "model: should be a valid string"),
        ('{"method": "draft_model", "model": "x", "quantization": "fp8"}', "quantization: should be 'none', 'int8'"),
        ('{"method": "draft_model", "model": "x", "prompt_lookup_min": 2}', "prompt_lookup_min: only the method ngram"),
        ('{"method": "suffix", "quantization": "int8"}', "quantization: only the method draft_model has it"),
        ('{"method": "suffix", "modell": "x"}', "modell: unknown key (known: method, num_speculative_tokens, "),
        (
            '{"method": "magic"}',
            "method: should be 'auto', 'ngram', 'suffix', 'draft_model', 'medusa', 'eagle' or 'eagle3'",
        ),
        ('{"method": 3}', "method: should be 'auto', 'ngram', 'suffix', 'draft_model', 'medusa', 'eagle' or 'ea"),
        ('{"method": "suffix", "model": "x"}', "model: only draft_model, medusa, eagle, eagle3 have it"),
        ('{"method": "suffix", "prompt_lookup_max": 3}', "prompt_lookup_max: only the method ngram has it"),
        ('{"method": "suffix", "num_speculative_tokens": 0}', "num_speculative_tokens: should be greater than"),
        ('{"method": "suffix", "num_speculative_tokens": 65}', "num_speculative_tokens: should be less than"),
        ('{"method": "suffix", "num_speculative_tokens": "8"}', "num_speculative_tokens: should be a valid integer"),
        ('{"method": "ngram", "prompt_lookup_min": 6}', "prompt_lookup_min: 6 is more than prompt_lookup_max"),
    ],
)
def test_what_is_wrong_is_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert str(error.value).startswith(reason)
