"""What a GPU engine's host does for a decoding step before anything is launched: `python -m tests.bench.host_path`.

Inputs are built and copied as for a card, but on a CPU: processor time of the host alone, which no GPU has to wait for
while it is shorter than a step.
"""

from __future__ import annotations

import sys
import time

import torch

from kernels.draw_tokens import draw_rows
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.block_tables import BlockTables
from services.gpu_worker.gpu_inputs import build_inputs, upload
from services.gpu_worker.speculative.verify import draws_of
from shared.protocol import SamplingParams

BLOCK_SIZE = 16
CONTEXT = 2048
STEPS = 50


def sequence(number: int) -> Sequence:
    num_blocks = 2 * CONTEXT // BLOCK_SIZE
    return Sequence(
        sid=f"s{number}", epoch=1, choice=0, params=SamplingParams(max_tokens=CONTEXT, seed=number),
        num_prompt_tokens=CONTEXT, token_ids=[i % 1000 for i in range(CONTEXT)],
        block_ids=list(range(number * num_blocks, (number + 1) * num_blocks)),
    )  # fmt: skip


def microseconds(batch: int) -> dict[str, float]:
    """Of a step: its inputs, what each row is drawn by, and their way to where the device reads them."""
    sequences = [sequence(i) for i in range(batch)]
    geometry = Geometry(batch * 2 * CONTEXT // BLOCK_SIZE, BLOCK_SIZE, 32, 8, 128, 128256, 2 * CONTEXT)
    tables, taken = BlockTables(), {"inputs": 0.0, "draws": 0.0, "upload": 0.0}
    for step in range(STEPS):
        for seq in sequences:
            seq.token_ids.append(step)
        chunks = [Chunk(seq, CONTEXT + step, 1, True) for seq in sequences]
        times = [time.thread_time()]
        inputs, sample_chunks = build_inputs(chunks, geometry, tables=tables)
        times.append(time.thread_time())
        rows = draw_rows([d.token_choice for d in draws_of(chunks, sample_chunks)])
        times.append(time.thread_time())
        upload([*inputs.tensors(), *rows.tensors()], torch.device("cpu"))
        times.append(time.thread_time())
        if step >= STEPS // 5:  # until then things are made that stay
            for name, start, end in zip(taken, times, times[1:], strict=False):
                taken[name] += (end - start) * 1e6 / (STEPS - STEPS // 5)
    return taken


def main() -> int:
    torch.set_num_threads(1)
    for batch in (1, 64, 256):
        parts = microseconds(batch)
        text = ", ".join(f"{name} {taken:.0f}" for name, taken in parts.items())
        sys.stdout.write(f"batch {batch}: {sum(parts.values()):.0f} us a step ({text})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
