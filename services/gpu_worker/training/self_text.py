"""Text that a model writes itself: prompts in, whole token sequences out, many at a time, by any engine.

Knows no files and no tokenizer. What it writes follows from prompts, seed and temperatures alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.gpu_worker.batch import Chunk, Engine, Sequence
from shared.protocol import SamplingParams

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # in turns: most people ask for little or none
PREFILL_TOKENS = 512  # of one chunk


@dataclass(frozen=True, slots=True)
class Text:
    number: int  # of its prompt
    num_prompt_tokens: int
    token_ids: list[int]


def write(
    engine: Engine, prompts: Mapping[int, Seq[int]], *, eos_token_ids: Seq[int], max_tokens: int, concurrency: int,
    seed: int,
) -> Iterator[Text]:  # fmt: skip
    """Each text as soon as it has ended, by one of eos_token_ids, which it keeps, or by length. Prompts that leave no
    room are passed over."""
    info = engine.info
    room = min(info.max_model_len, info.num_blocks // concurrency * info.block_size)
    num_blocks = -(-room // info.block_size)
    places = list(range(concurrency))
    waiting = iter(prompts.items())
    running: dict[int, Sequence] = {}  # by place
    while True:
        while places and (found := next(waiting, None)) is not None:
            number, prompt = found
            if len(prompt) >= room:
                continue
            place = places.pop()
            blocks = list(range(place * num_blocks, (place + 1) * num_blocks))
            running[place] = _sequence(number, prompt, blocks, max_tokens, seed)
        if not running:
            return
        step(engine, list(running.values()))
        for place, seq in list(running.items()):
            has_room = seq.num_output_tokens < max_tokens and len(seq.token_ids) < room
            if seq.num_output_tokens == 0 or (has_room and seq.token_ids[-1] not in eos_token_ids):
                continue
            places.append(place)
            del running[place]
            yield Text(int(seq.sid), seq.num_prompt_tokens, seq.token_ids)


def _sequence(number: int, prompt: Seq[int], blocks: list[int], max_tokens: int, seed: int) -> Sequence:
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + number)
    return Sequence(
        sid=str(number), epoch=0, choice=0, params=params, num_prompt_tokens=len(prompt), token_ids=list(prompt),
        block_ids=blocks,
    )  # fmt: skip


def step(engine: Engine, sequences: Seq[Sequence]) -> None:
    """One step of all; what is drawn goes to their tokens."""
    chunks = []
    for seq in sequences:
        count = min(seq.num_remaining, PREFILL_TOKENS)
        chunks.append(Chunk(seq, seq.num_computed, count, count == seq.num_remaining))
    for chunk, drawn in zip(chunks, engine.step(chunks), strict=True):
        chunk.seq.num_computed += chunk.count
        chunk.seq.token_ids += [token.token_id for token in drawn]
