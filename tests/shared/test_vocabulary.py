"""A worker reads the same bytes for every token as a gateway does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from services.gateway import byte_tokenizer, tokenization
from shared.model_source import ModelSource, ModelSourceError, default_cache_dir, resolve
from shared.settings import DEFAULT_MODEL
from shared.vocabulary import VocabularyError, hf_vocabulary, read_vocabulary, scripted_vocabulary


def check_same(source: ModelSource) -> None:
    gateway, worker = tokenization.Tokenizer.from_source(source), read_vocabulary(source)
    assert worker.tokens == [gateway.token_bytes(i) for i in range(gateway.vocab_size)]
    assert worker.special_ids == gateway.special_token_ids


@pytest.mark.model
def test_of_the_default_model() -> None:
    try:
        check_same(resolve(DEFAULT_MODEL, default_cache_dir()))
    except ModelSourceError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_of_a_folder(tmp_path: Path, kind: str) -> None:
    pieces = ["a", "Ġb", "é"] if kind == "byte-level" else ["▁a", "<0xF0>", "é", "b"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel() if kind == "byte-level" else decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    check_same(ModelSource("x", tmp_path, "hf"))


def test_of_the_scripted_engine() -> None:
    gateway, worker = byte_tokenizer.byte_tokenizer(), scripted_vocabulary()
    assert worker.tokens == [gateway.token_bytes(i) for i in range(gateway.vocab_size)]
    assert worker.special_ids == gateway.special_token_ids


def test_of_an_unknown_kind() -> None:
    with pytest.raises(VocabularyError, match="WordPiece"):
        hf_vocabulary(json.loads('{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}'))
