"""Token ids and words that a request names, checked against the vocabulary. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.errors import BadRequest
from services.gateway.json_reader import shown
from services.gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.tokenization import Tokenizer
from shared.protocol import Constraint


def checked_ids(values: Sequence[Any], vocab_size: int, path: str) -> list[int]:
    """Token ids of the vocabulary; BadRequest names the position of one that is not."""
    ids = []
    for i, value in enumerate(values):
        token_id = int(value) if isinstance(value, float) and value.is_integer() else value
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            where = f"{path}[{i}]"
            raise BadRequest(f"{where} is not a token id (0 to {vocab_size - 1})", param=where)
        ids.append(token_id)
    return ids


def logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    resolved = {}
    for key, bias in biases.items():
        # Compared as text too: no sign, space, leading zero or digit of another script, hence no two keys for one id.
        if not (key.isascii() and key.isdigit() and len(key) < 12 and str(int(key)) == key and int(key) < vocab_size):
            raise BadRequest(
                f"logit_bias.{shown(key)} is not a token id (0 to {vocab_size - 1})", param=f"logit_bias.{shown(key)}"
            )
        resolved[int(key)] = bias
    return resolved


def word_limits(
    request: ChatCompletionRequest | CompletionRequest, tokenizer: Tokenizer, rules: Constraint | None
) -> Constraint | None:
    """With `allowed_token_ids` and `bad_words`; the latter with and without a space before them, as vLLM has it."""
    if not (request.allowed_token_ids or request.bad_words):
        return rules
    only = checked_ids(request.allowed_token_ids or (), tokenizer.vocab_size, "allowed_token_ids")
    words: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(request.bad_words):
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids or not word.strip():
                raise BadRequest(f"bad_words[{i}] has no tokens", param=f"bad_words[{i}]")
            words[ids] = None
    limits = {"allowed_ids": tuple(only), "bad_words": tuple(words)}
    return (rules or Constraint()).model_copy(update=limits)
