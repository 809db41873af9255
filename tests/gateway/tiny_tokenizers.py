"""Tokenizers over a handful of given tokens, so that a test says in bytes what each token id means."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import models

from services.gateway.tokenization import Tokenizer
from services.gateway.tokenizer_parts import TokenizerParts


def tiny_tokenizer(
    pieces: Sequence[bytes | str],
    special: Sequence[str] = (),
    eos: str = "",
    bos: str = "",
    template: str | None = None,
) -> Tokenizer:
    """Ids count through the pieces and then the special tokens. A text is encoded as bytes, if each byte is a piece.

    bos, if given, is put before a plain text. Long pieces are never chosen by `encode`, which tests do not mind.
    """
    table = [p.encode() if isinstance(p, str) else p for p in [*pieces, *special]]
    special_ids = {text: len(pieces) + i for i, text in enumerate(special)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=_vocab(table, special_ids), merges=[]))
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special])
    bos_id = special_ids.get(bos)
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            token_bytes=lambda i: table[i],
            vocab_size=len(table),
            special_token_ids=frozenset(special_ids.values()),
            eos_token_ids=(special_ids[eos],) if eos else (),
            bos_token_id=bos_id,
            prefix_ids=(bos_id,) if bos_id is not None else (),
            chat_template=template,
            template_tokens={"bos_token": bos, "eos_token": eos},
        )
    )


def _vocab(table: list[bytes], special_ids: dict[str, int]) -> dict[str, int]:
    names = {i: text for text, i in special_ids.items()}
    vocab: dict[str, int] = {}
    for i, piece in enumerate(table):
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            text = f"<0x{piece.hex()}>"
        vocab[names.get(i, text if text not in vocab else f"{text}#{i}")] = i
    return vocab


ASCII = [bytes([b]) for b in range(128)]  # token id = byte, so that any ASCII text can be a prompt
