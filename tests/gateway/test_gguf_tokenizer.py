"""Tokenizers from GGUF metadata give llama.cpp's ids, which were recorded from its server."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from services.gateway import gguf_tokenizer
from services.gateway.tokenization import Tokenizer
from services.gateway.tokenizer_parts import TokenizerError
from shared.model_source import default_cache_dir, resolve
from shared.vocabulary import BYTE_OF_CHAR
from tests.gateway.mixed_strings import mixed_strings
from tests.gateway.revealing_vocabulary import SPECIAL, revealing_vocabulary

DATA = Path(__file__).parent / "data"
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4


def recorded(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    return entries


@lru_cache
def vocabulary() -> tuple[list[str], list[str]]:
    return revealing_vocabulary(mixed_strings())


def revealing_metadata(pre: str) -> dict[str, Any]:
    tokens, merges = vocabulary()
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.model
def test_the_default_model_s_ids_are_llama_cpp_s() -> None:
    tokenizer = Tokenizer.from_source(resolve("smollm2-135m-instruct", default_cache_dir()))
    entries = recorded(DATA / "llama_tokenize.json")
    assert [e["text"] for e in entries] == mixed_strings() and len(entries) == 200
    for e in entries:
        ids = tokenizer.encode(e["text"], add_special_tokens=False)
        assert ids == e["ids"], e["text"]
        plain = tokenizer.encode(e["text"], add_special_tokens=False, parse_special=False)
        assert plain == e.get("plain_ids", e["ids"]), e["text"]
    assert tokenizer.eos_token_ids == (2, 0) and not tokenizer.add_bos
    assert (tokenizer.vocab_size, tokenizer.max_model_len) == (49152, 8192)
    assert tokenizer.template_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-v3", "tekken"])
def test_pre_tokenizers_cut_as_llama_cpp_does(pre: str) -> None:
    tokenizer = Tokenizer(gguf_tokenizer.build(revealing_metadata(pre)))
    expected = {e["text"]: e for e in recorded(DATA / "cuts" / "gpt-2.json")}
    others = recorded(DATA / "cuts" / f"{pre}.json")  # those that differ from gpt-2's
    expected |= {e["text"]: e for e in others}
    assert len(expected) == 200 and len(others) > 30
    for text, e in expected.items():
        assert tokenizer.encode(text, add_special_tokens=False) == e["ids"], text
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert plain == e.get("plain_ids", e["ids"]), text


@pytest.mark.parametrize("pre", list(gguf_tokenizer.SPLITS))
def test_every_known_pre_tokenizer_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer(gguf_tokenizer.build(revealing_metadata(pre)))
    for text in mixed_strings():
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def small_metadata(**changes: Any) -> dict[str, Any]:
    chars = [c for c, b in BYTE_OF_CHAR.items() if b != ord("x")]
    tokens = [*chars, "ab", "ac", "<s>", "</s>", "<|im_end|>", "<tool>"]
    n = len(tokens)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (n - 4) + [CONTROL, CONTROL, NORMAL, USER_DEFINED],
        "tokenizer.ggml.merges": ["a b", "a c"],
        "tokenizer.ggml.bos_token_id": n - 4,
        "tokenizer.ggml.eos_token_id": n - 3,
        "tokenizer.chat_template": "T",
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def small(**changes: Any) -> Tokenizer:
    return Tokenizer(gguf_tokenizer.build(small_metadata(**changes)))


def test_a_byte_without_a_token_is_dropped_and_nothing_merges_across_it() -> None:
    tokenizer = small()
    a, ab, b = (tokenizer.encode(t, add_special_tokens=False) for t in ("a", "ab", "b"))
    assert len(ab) == 1
    assert tokenizer.encode("axb", add_special_tokens=False) == [*a, *b]
    assert tokenizer.encode("xxx", add_special_tokens=False) == []


def test_kinds_of_tokens() -> None:
    tokenizer = small()
    n = tokenizer.vocab_size
    bos, eos, turn_end, tool = range(n - 4, n)
    assert tokenizer.special_token_ids == {bos, eos, turn_end}  # an end of turn also where its type is wrong
    assert tokenizer.eos_token_ids == (eos, turn_end)
    text = "<s>a<|im_end|><tool>"
    assert tokenizer.encode(text, add_special_tokens=False) == [
        bos,
        *tokenizer.encode("a", add_special_tokens=False),
        turn_end,
        tool,
    ]
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert plain[-1] == tool and bos not in plain and turn_end not in plain and tokenizer.decode(plain) == text
    assert tokenizer.decode([bos, tool, eos], skip_special_tokens=True) == "<tool>"
    assert tokenizer.token_text(bos) == "<s>"


@pytest.mark.parametrize(
    ("changes", "adds_bos"),
    [
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, False),
    ],
)
def test_bos_is_added_where_the_model_wants_it(changes: dict[str, Any], adds_bos: bool) -> None:
    tokenizer = small(**changes)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.add_bos == adds_bos
    assert tokenizer.encode("ab", add_special_tokens=True) == ([tokenizer.bos_token_id] if adds_bos else []) + plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "kind 'llama'"),
        ({"tokenizer.ggml.model": None}, "kind None"),
        ({"tokenizer.ggml.pre": "nonsense"}, "unknown pre-tokenizer 'nonsense'"),
        ({"tokenizer.ggml.pre": None}, "unknown pre-tokenizer 'default'"),
        ({"tokenizer.ggml.token_type": [1]}, "one token type a token"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None}, "two equal tokens"),
        ({"tokenizer.ggml.merges": ["a nothing"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges do not fit"),
    ],
)
def test_what_is_not_known_exactly_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        small(**changes)
