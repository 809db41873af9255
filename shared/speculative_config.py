"""What `--speculative-config` says: a word, or JSON with vLLM's names. *Pure.*"""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

AUTO = "auto"  # the default: the method of that name, where it was measured to cost little
OFF = "none"
HEADS = ("medusa", "eagle", "eagle3")
MODELS = ("draft_model", *HEADS)
MAX_SPECULATIVE_TOKENS = 64
OF_METHODS = {
    "prompt_lookup_min": ("ngram",), "prompt_lookup_max": ("ngram",), "model": MODELS, "quantization": ("draft_model",),
}  # fmt: skip


class SpeculativeConfig(BaseModel):
    """num_speculative_tokens: most drafts of a sequence in a step. prompt_lookup_min, prompt_lookup_max: of `ngram`,
    how many tokens must stand before. fleet: drafts come from other answers of the same tenant too. model: of
    `draft_model`, as the served one; of heads, a folder, or nothing for those that come along. quantization: of
    `draft_model`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    method: Literal["auto", "ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3"]
    num_speculative_tokens: int = Field(default=16, ge=1, le=MAX_SPECULATIVE_TOKENS)
    prompt_lookup_min: int = Field(default=2, ge=1, le=16)
    prompt_lookup_max: int = Field(default=5, ge=1, le=16)
    fleet: bool = True
    model: str = Field(default="", max_length=4096)
    quantization: Literal["none", "int8", "int4"] = "none"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min: {self.prompt_lookup_min} is more than prompt_lookup_max")
        return self

    @model_validator(mode="before")
    @classmethod
    def _known(cls, fields: Any) -> Any:
        for name, methods in OF_METHODS.items():
            if name in fields and fields.get("method") not in methods:
                only = f"only the method {methods[0]} has" if len(methods) == 1 else f"only {', '.join(methods)} have"
                raise ValueError(f"{name}: {only} it")
        if fields.get("method") in MODELS:
            if "fleet" in fields:
                raise ValueError(f"fleet: the method {fields['method']} does not have it")
            if not fields.get("model") and fields["method"] != "eagle3":
                raise ValueError("model: is missing")
        return fields


def parse(text: str, *, is_native: bool) -> SpeculativeConfig | None:
    """For an engine, native or not: None for "none", and for "auto" where it is not. ValueError names the key that is
    wrong."""
    if text == OFF:
        return None
    if text == AUTO:
        return SpeculativeConfig(method="auto") if is_native else None
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f'must be {AUTO}, {OFF} or a JSON object like {{"method": "suffix"}}')
    try:
        return SpeculativeConfig.model_validate(fields)
    except ValidationError as e:
        raise ValueError(_sentence(e)) from None


def check(text: str) -> str:
    parse(text, is_native=True)
    return text


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"{name}: unknown key (known: {', '.join(SpeculativeConfig.model_fields)})"
    if first["type"] == "missing":
        return f"{name}: is missing"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{name}: {message}" if name else message
