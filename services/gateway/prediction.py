"""OpenAI's `prediction`: what the client expects the answer to be; its tokens for a worker, and how much came true.

*Pure.* What counts as accepted is a function of the prediction and the answer's tokens alone, not of what a worker has
drafted, so that it is the same wherever and however often they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from services.gateway.tokenization import Tokenizer
from shared.protocol import MAX_PREDICTION_TOKENS

WINDOW = 64  # tokens that an answer may leave out at once
MAX_PARTS = 4096


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class PredictionPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["text"]
    text: str


PredictionParts = Annotated[list[PredictionPart], Field(max_length=MAX_PARTS)]


class Prediction(BaseModel):
    """What the answer is expected to be, mostly."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["content"]
    content: Annotated[PredictionParts, BeforeValidator(_as_parts, json_schema_input_type=str | PredictionParts)]


def predicted_ids(prediction: Prediction | None, tokenizer: Tokenizer, max_tokens: int) -> Sequence[int]:
    """As many as the context holds and a record may: it is a hint, so the rest is left out."""
    if prediction is None:
        return ()
    most = min(max_tokens, MAX_PREDICTION_TOKENS)
    text = "".join(part.text for part in prediction.content)[: max(16, tokenizer.max_token_chars) * most]
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)[:most]


class PredictionMatch:
    """Follows an answer through its prediction. Where they differ it goes on behind the answer's last two tokens, if
    they stand within the next WINDOW of the prediction; never back."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.num_accepted = 0
        self._ids = ids
        self._next = 0
        self._last = -1

    def push(self, token_id: int) -> None:
        ids, at = self._ids, self._next
        if at < len(ids):
            if ids[at] == token_id:
                self.num_accepted += 1
                self._next += 1
            else:
                self._next = self._behind(self._last, token_id)
        self._last = token_id

    def _behind(self, first: int, second: int) -> int:
        ids = self._ids
        for at in range(self._next, min(self._next + WINDOW, len(ids) - 1)):
            if ids[at + 1] == second and ids[at] == first:
                return at + 2
        return self._next

    @property
    def num_rejected(self) -> int:
        return len(self._ids) - self.num_accepted
