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
