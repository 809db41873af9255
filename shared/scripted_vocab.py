"""The vocabulary of the scripted engine and the tokens it draws: for the worker, the gateway and tests. *Pure.*

Ids below 256 are bytes, so that any text can be a prompt and any bytes, also halves of characters, can be an answer.
Above them lie two ordinary special tokens and markers that give orders to the engine when they stand in a prompt:

    CRASH k   the process exits when output token number k is drawn   (k is the id after the marker; absent: 0)
    HANG k    that step never ends
    RAISE k   that step raises
    OOM k     memory runs out in every step of more than k tokens that it is in
    SCRIPT …  everything after it, to the end of the prompt, is drawn verbatim, one token a step, then EOS

Markers count only before a SCRIPT. A prompt without SCRIPT is answered with lower-case text, without end.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from shared.wire import pack_ids

NUM_BYTES = 256
BOS = 256
EOS = 257
CRASH = 258
HANG = 259
RAISE = 260
SCRIPT = 261
OOM = 262
VOCAB_SIZE = 263

SPECIAL_TOKENS = {
    "<bos>": BOS, "<eos>": EOS, "<crash>": CRASH, "<hang>": HANG, "<raise>": RAISE, "<script>": SCRIPT, "<oom>": OOM,
}  # fmt: skip
ALPHABET = b"abcdefghijklmnopqrstuvwxyz     ."
NUM_CONTEXT_TOKENS = 8  # how many of the last tokens decide the next one, beside their number


def next_token(ids: Sequence[int], num_prompt_tokens: int, seed: int = 0, choice: int = 0) -> int:
    """The token after ids: of the prompt's script, or a function of the last ids, their number, seed and choice.

    Greedy decoding is seed 0 and choice 0.
    """
    start = _script_start(ids, num_prompt_tokens)
    if start >= 0:
        at = start + len(ids) - num_prompt_tokens
        return ids[at] if at < num_prompt_tokens else EOS
    words = [*ids[-NUM_CONTEXT_TOKENS:], len(ids), seed & 0xFFFFFFFF, seed >> 32, choice]
    # A checksum is linear: without the product two seeds whose low bits agree once would agree in every token.
    return ALPHABET[(zlib.crc32(pack_ids(words)) * 0x9E3779B1 & 0xFFFFFFFF) * len(ALPHABET) >> 32]


def rank(ids: Sequence[int]) -> int:
    """Of the last token of a part of a prompt: 1 is the likeliest. Its log-probability is -rank / 4."""
    return zlib.crc32(pack_ids([*ids[-NUM_CONTEXT_TOKENS:], len(ids)])) % 6 + 1


def answer(prompt_ids: Sequence[int], num_tokens: int, seed: int = 0, choice: int = 0) -> list[int]:
    """The first num_tokens tokens drawn after a prompt, not stopping anywhere."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(next_token(ids, len(prompt_ids), seed, choice))
    return ids[len(prompt_ids) :]


def marker_at(ids: Sequence[int], num_prompt_tokens: int, marker: int) -> int:
    """The number after the marker: for CRASH, HANG and RAISE the output position at which it takes effect; -1 if the
    prompt does not have it."""
    end = _script_start(ids, num_prompt_tokens) - 1
    at = _find(ids, marker, end if end >= 0 else num_prompt_tokens)
    if at < 0:
        return -1
    return ids[at + 1] if at + 1 < num_prompt_tokens and ids[at + 1] < NUM_BYTES else 0


def _script_start(ids: Sequence[int], num_prompt_tokens: int) -> int:
    """Index of the first token of the script; -1 without one."""
    return _find(ids, SCRIPT, num_prompt_tokens) + 1 or -1


def _find(ids: Sequence[int], token: int, end: int) -> int:
    try:
        return ids.index(token, 0, end)
    except ValueError:
        return -1
