"""A byte-level BPE vocabulary in which every difference between two pre-tokenizers shows in the ids.

A trained vocabulary has hardly a merge across the cuts of the pre-tokenizer it was trained with, so that other cuts
often give the same ids. Here each string is merged pairwise up to a single token: a cut anywhere breaks some merge.
"""

from __future__ import annotations

from shared.vocabulary import BYTE_OF_CHAR

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>")


def revealing_vocabulary(strings: list[str]) -> tuple[list[str], list[str]]:
    """Tokens (special ones first, then the bytes) and merges, both as a GGUF file holds them."""
    char_of = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    rows = [[char_of[b] for b in text.encode()] for text in strings]
    tokens = dict.fromkeys([*SPECIAL, *(char_of[b] for b in range(256))])
    merges: dict[str, None] = {}
    while any(len(row) > 1 for row in rows):
        for i, row in enumerate(rows):
            pairs = [row[k : k + 2] for k in range(0, len(row), 2)]
            merges |= dict.fromkeys(" ".join(pair) for pair in pairs if len(pair) == 2)
            rows[i] = ["".join(pair) for pair in pairs]
            tokens |= dict.fromkeys(rows[i])
    return list(tokens), list(merges)
