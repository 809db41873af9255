"""The text of a prompt as it stands before an answer, token by token. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenization import Tokenizer


def echo_pieces(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[str]:
    """One a token; joined they are `Tokenizer.echo_text`. A character that several tokens make is the last one's."""
    whole = tokenizer.echo_text(list(prompt_ids))
    decoder = Detokenizer(tokenizer)
    pieces = [decoder.push(token_id) for token_id in prompt_ids]
    pieces[-1] += decoder.flush()
    num_hidden = sum(map(len, pieces)) - len(whole)  # a BOS that was added, the space that a tokenizer puts in front
    for i, piece in enumerate(pieces):
        pieces[i] = piece[num_hidden:]
        num_hidden -= min(num_hidden, len(piece))
    return pieces
