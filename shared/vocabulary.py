"""What bytes a model's tokens stand for, read from its files. *Pure.*

Gateways make text of them, workers hold answers to a grammar by them; how a text is cut into tokens is the gateway's
alone. Byte-level and SentencePiece-style vocabularies are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared import scripted_vocab
from shared.gguf_header import read_gguf
from shared.model_source import ModelSource

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types in GGUF
# Files name one end token at most, while chat models end a turn with others; llama.cpp knows them by their text.
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<|end_of_text|>", "<end_of_utterance>", "</s>", "<eos>",
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyError(ValueError):
    """The vocabulary is of a kind that is not known exactly; one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: the bytes of every id; empty for an id that stands for nothing."""

    tokens: list[bytes]
    special_ids: frozenset[int]


def read_vocabulary(source: ModelSource) -> Vocabulary:
    """VocabularyError or KeyError where the files do not say it; some tenths of a second for a large one."""
    if source.kind == "gguf":
        return gguf_vocabulary(read_gguf(source.path).metadata)
    return hf_vocabulary(json.loads((source.path / "tokenizer.json").read_text(encoding="utf-8")))


def scripted_vocabulary() -> Vocabulary:
    texts = {i: text.encode() for text, i in scripted_vocab.SPECIAL_TOKENS.items()}
    tokens = [texts.get(i) or bytes([i]) for i in range(scripted_vocab.VOCAB_SIZE)]
    return Vocabulary(tokens, frozenset(texts))


# --- GGUF ---------------------------------------------------------------------------------------------------------


def gguf_vocabulary(metadata: dict[str, Any]) -> Vocabulary:
    types = gguf_token_types(metadata)
    special = frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL))
    return Vocabulary(gguf_token_bytes(metadata, types), special)


def gguf_token_types(metadata: dict[str, Any]) -> list[int]:
    """One a token; an end-of-turn text is a control token even where a converter forgot to say so."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = list(metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    if len(types) != len(tokens):
        raise VocabularyError("the GGUF file has not one token type a token")
    ends = frozenset(END_TEXTS)
    return [CONTROL if token in ends else kind for token, kind in zip(tokens, types, strict=True)]


def gguf_token_bytes(metadata: dict[str, Any], types: list[int]) -> list[bytes]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    whole = (UNKNOWN, CONTROL, USER_DEFINED)
    return [
        token.encode("utf-8") if kind in whole else byte_level_bytes(token)
        for token, kind in zip(tokens, types, strict=True)
    ]


# --- Hugging Face -------------------------------------------------------------------------------------------------


def hf_vocabulary(tokenizer: dict[str, Any]) -> Vocabulary:
    """Of what stands in tokenizer.json."""
    model = tokenizer["model"]["vocab"]
    by_id = (
        {i: piece for piece, i in model.items()} if isinstance(model, dict) else dict(enumerate(p for p, _ in model))
    )
    piece_bytes, _ = piece_decoder(tokenizer.get("decoder"))
    added = {token["id"]: token for token in tokenizer.get("added_tokens") or []}
    by_id |= {i: token["content"] for i, token in added.items()}
    tokens = [hf_token_bytes(by_id.get(i, ""), i in added, piece_bytes) for i in range(max(by_id, default=-1) + 1)]
    return Vocabulary(tokens, frozenset(i for i, token in added.items() if token.get("special")))


def hf_token_bytes(token: str, is_added: bool, piece_bytes: Callable[[str], bytes]) -> bytes:
    return token.encode("utf-8") if is_added and "▁" not in token else piece_bytes(token)


def piece_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a token's text becomes bytes, and whether decoding takes a leading space away."""
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return byte_level_bytes, False
    if "Metaspace" in kinds or any(_replaces_underline(step) for step in steps):
        strips = any(
            step.get("type") == "Strip"
            and step.get("start", 0) > 0
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return _sentencepiece_bytes, strips
    raise VocabularyError(f"a decoder of an unknown kind ({', '.join(map(str, kinds))})")


def _replaces_underline(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": "▁"} and step.get("content") == " "


def _sentencepiece_bytes(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode("utf-8")


# --- byte-level BPE -----------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes the 256 bytes: itself where printable, else from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHAR = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one that is not written in the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHAR[c] for c in token])
    except KeyError:
        return token.encode("utf-8")
