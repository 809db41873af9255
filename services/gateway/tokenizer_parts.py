"""What a tokenizer is made of, whichever file it came from; `gguf_tokenizer` and `hf_tokenizer` build it. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import tokenizers


class TokenizerError(ValueError):
    """The model's tokenizer cannot be used; one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """backend parses special tokens and adds none; ids at or above vocab_size in its answers are dropped.

    token_bytes gives the bytes that a token stands for. prefix_ids and suffix_ids are what the model wants around a
    plain text (BOS, EOS). strips_first_space: the tokenizer puts a space before a text, which decoding takes away.
    template_tokens are the names (bos_token, eos_token, ...) that a chat template may use.
    """

    backend: tokenizers.Tokenizer
    token_bytes: Callable[[int], bytes]
    vocab_size: int
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    strips_first_space: bool = False
    chat_template: str | None = None
    template_tokens: dict[str, str] = field(default_factory=dict)
    max_model_len: int | None = None


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
