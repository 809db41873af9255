"""Text to token ids and back, for whatever model is served. *Pure* once built.

Token ids in, bytes out: a token may be part of a character, so text exists only where bytes are joined
(`detokenizer.py`). Output tokens continue the prompt, so the space that a SentencePiece tokenizer puts before a text
is taken away only by `decode`, never from a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

import tokenizers

from services.gateway import gguf_tokenizer, hf_tokenizer
from services.gateway.tokenizer_parts import TokenizerError, TokenizerParts
from shared.gguf_header import GGUFError, read_gguf
from shared.model_source import ModelSource

__all__ = ["Tokenizer", "TokenizerError"]

LONG_TEXT_CHARS = 2048


class Tokenizer:
    """Immutable and safe to use from several threads; `encode` of a long text may take a second, and frees the GIL."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self.vocab_size = parts.vocab_size
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_token_ids = parts.special_token_ids
        self.add_bos = parts.bos_token_id is not None and parts.bos_token_id in parts.prefix_ids
        self.chat_template = parts.chat_template
        self.template_tokens = parts.template_tokens
        self.max_model_len = parts.max_model_len
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        """The tokenizer in the model's files; TokenizerError if there is none that can be used exactly."""
        if source.kind == "hf":
            return cls(hf_tokenizer.build(source.path))
        try:
            metadata = read_gguf(source.path).metadata
        except (GGUFError, OSError) as e:
            raise TokenizerError(f"{source.path} cannot be read: {e}") from e
        try:
            return cls(gguf_tokenizer.build(metadata))
        except KeyError as e:
            raise TokenizerError(f"{source.path} lacks the metadata key {e}") from e

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        """parse_special: a special token's text becomes that token; otherwise it is text like any other."""
        backend = self._parts.backend if parse_special else self._plain_backend
        ids = self._ids(backend, text)
        if ids and max(ids) >= self.vocab_size:
            ids = [i for i in ids if i < self.vocab_size]  # bytes without a token
        return self.surrounded(ids) if add_special_tokens else ids

    @staticmethod
    def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """`encode` keeps the GIL until it is done, 0.2 s for 100,000 letters; `encode_batch` frees it."""
        if len(text) <= LONG_TEXT_CHARS:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        else:
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        return ids

    def surrounded(self, ids: list[int]) -> list[int]:
        """The ids with what the model wants around a plain text (BOS, EOS)."""
        return [*self._parts.prefix_ids, *ids, *self._parts.suffix_ids]

    def encode_prompt(self, text: str) -> list[int]:
        """A plain text as the model wants it, with one BOS also where the text already begins with BOS's own text."""
        ids = self.encode(text, add_special_tokens=True)
        doubled = self.add_bos and ids[:2] == [self.bos_token_id, self.bos_token_id]
        return ids[1:] if doubled else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of these tokens as a whole; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(i) for i in ids if i not in skipped]).decode("utf-8", "replace")
        return text[1:] if self._parts.strips_first_space and text.startswith(" ") else text

    def echo_text(self, ids: list[int]) -> str:
        """The text of a prompt as its client wrote it: special tokens shown, but not a BOS that was added."""
        return self.decode(ids[1:] if self.add_bos and ids[:1] == [self.bos_token_id] else ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id past the vocabulary (output layers may be wider)."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._parts.token_bytes(token_id) if 0 <= token_id < self.vocab_size else b""
            self._bytes[token_id] = data
        return data

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token whose bytes are whole characters, else None."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        try:
            text: str | None = self.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self._whole[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        """A token as people read it: its text, or `bytes:\\xf0\\x9f` where it is a part of a character."""
        text = self.whole_text(token_id)
        return text if text is not None else "bytes:" + "".join(f"\\x{b:02x}" for b in self.token_bytes(token_id))

    def token_id(self, text: str) -> int | None:
        """The token, special or not, that this text stands for."""
        ids = self.encode(text, add_special_tokens=False)
        found = self.token_text(ids[0]) if len(ids) == 1 else ""
        return ids[0] if found.replace("▁", " ").strip() == text.replace("▁", " ").strip() else None

    def encode_rest(self, text: str) -> list[int]:
        """A text that goes on with another: no space is put in front. Special tokens are text in it."""
        ids = self.encode(text, add_special_tokens=False, parse_special=False)
        if not self._parts.strips_first_space or not text:
            return ids
        begin = self.encode("\n", add_special_tokens=False, parse_special=False)
        both = self.encode("\n" + text, add_special_tokens=False, parse_special=False)
        return both[len(begin) :] if both[: len(begin)] == begin else ids

    def special_token_id(self, text: str) -> int | None:
        """The special token with this text."""
        ids = self.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] in self.special_token_ids else None

    def stops_with_special_text(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """Those that contain the whole text of a special token."""
        pattern = self._special_texts
        return tuple(stop for stop in stops if pattern.search(stop)) if pattern is not None else ()

    @cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters than this: it has at least as many bytes."""
        return max(len(self._parts.token_bytes(i)) for i in range(self.vocab_size))

    @cached_property
    def _special_texts(self) -> re.Pattern[str] | None:
        texts = [re.escape(text) for i in self.special_token_ids if (text := self.whole_text(i))]
        return re.compile("|".join(texts)) if texts else None

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text: the switch belongs to the object, and calls may run in threads."""
        backend = tokenizers.Tokenizer.from_str(self._parts.backend.to_str())
        backend.encode_special_tokens = True
        return backend
