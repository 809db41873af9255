"""Completions with a `suffix`: what stands between two texts. How a model is asked is known by its tokens. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.errors import BadRequest
from services.gateway.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """Texts of the tokens before the two parts and, where there is one, before the answer. ends: of tokens behind an
    answer, beside the model's own."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()


FORMATS = (
    InfillFormat(  # Qwen Coder, CodeGemma
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
    ),
    InfillFormat(  # StarCoder, Granite Code
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<filename>", "<reponame>"),
    ),
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    InfillFormat("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Infill:
    """A format as ids of a vocabulary; middle_ids: one token, or none."""

    prefix_id: int
    suffix_id: int
    middle_ids: tuple[int, ...]
    suffix_first: bool
    end_ids: tuple[int, ...]

    def prompt_ids(self, prefix: str, suffix: str, tokenizer: Tokenizer) -> list[int]:
        """Texts that look like a special token are text."""
        head = [self.prefix_id, *tokenizer.encode(prefix, add_special_tokens=False, parse_special=False)]
        tail = [self.suffix_id, *tokenizer.encode_rest(suffix)]
        return tokenizer.surrounded([*(tail + head if self.suffix_first else head + tail), *self.middle_ids])


def infill_of(tokenizer: Tokenizer) -> Infill:
    """BadRequest where the model has no such tokens."""
    for row in FORMATS:
        ids = [tokenizer.token_id(text) for text in (row.prefix, row.suffix, row.middle) if text]
        known = [i for i in ids if i is not None]
        if len(known) == len(ids):
            ends = tuple(i for text in row.ends if (i := tokenizer.token_id(text)) is not None)
            return Infill(known[0], known[1], tuple(known[2:]), row.suffix_first, ends)
    raise BadRequest("suffix is not supported: the model has no tokens for filling in the middle", param="suffix",
                     code="unsupported_parameter")  # fmt: skip


def check_goes_with(prompt: object, echo: bool) -> None:
    """What a suffix goes together with."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest("suffix needs prompts that are texts", param="suffix")
    if echo:
        raise BadRequest("suffix together with echo is not supported", param="suffix")
