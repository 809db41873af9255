"""Steps and guesses for sequences that nobody asked for: a GPU compiles kernels by them before anybody has to wait.

All is written into the first block. Else the first guesses would take seconds, be charged for them, and rest.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from services.gpu_worker.batch import Chunk, Engine, Sequence
from services.gpu_worker.speculative.gpu_eagle import GpuEagle
from services.gpu_worker.speculative.gpu_medusa import GpuMedusa
from services.gpu_worker.speculative.native_eagle import Wanted
from shared.protocol import SamplingParams

SIZES = (1, 2, 4, 8, 16, 32, 64)  # sequences
LONG = (64, 512)  # rows of one that catches up
NUM_GUESSES = 2


def sizes_on(device: torch.device) -> tuple[int, ...]:
    """Where nothing is compiled one will do."""
    return SIZES if device.type == "cuda" else SIZES[:1]


def warm_up_engine(engine: Engine, sizes: Seq[int]) -> None:
    for size in sizes:
        engine.step([Chunk(seq, 0, 1, True) for seq in _made_up(size, 1)])


def warm_up_eagle(head: GpuEagle, num_taps: int, sizes: Seq[int], max_model_len: int) -> None:
    def wanted(num_rows: int) -> Wanted:
        taps = torch.zeros(num_rows, num_taps, head.config.layer.hidden_size, dtype=head.dtype, device=head.device)
        (seq,) = _made_up(1, num_rows + 1)
        return Wanted(seq, 0, taps, NUM_GUESSES)

    for size in sizes:
        head.guess([wanted(1) for _ in range(size)])
    for num_rows in LONG if len(sizes) > 1 else ():
        if num_rows + NUM_GUESSES < max_model_len:
            head.guess([wanted(num_rows)])


def warm_up_medusa(heads: GpuMedusa, rows: torch.Tensor, sizes: Seq[int]) -> None:
    """rows [1, hidden_size]: any."""
    for size in sizes:
        heads.guess(_made_up(size, 1), rows.expand(size, -1).contiguous(), [heads.num_heads] * size)


def _made_up(num: int, num_tokens: int) -> list[Sequence]:
    """Of which every second draws with noise."""
    return [
        Sequence(
            sid=f"warm-up.{n}", epoch=0, choice=0, num_prompt_tokens=num_tokens, token_ids=[0] * num_tokens,
            params=SamplingParams(max_tokens=1, temperature=float(n % 2 == 0), seed=0, logprobs=0),
            block_ids=[0] * (num_tokens + NUM_GUESSES),
        )
        for n in range(num)
    ]  # fmt: skip
