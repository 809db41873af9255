"""Medusa heads on a GPU's ops: what `native_medusa` does. All heads are put in the queue, and the host waits once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from kernels.draw_tokens import DrawRows, draw_rows
from services.gpu_worker.batch import Sequence
from services.gpu_worker.engine import memory_errors
from services.gpu_worker.gpu_inputs import upload
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.layers import Product
from services.gpu_worker.speculative.gpu_eagle import choice_of, draw_drafted, guesses_of
from services.gpu_worker.speculative.head_config import MedusaConfig, read_medusa
from services.gpu_worker.speculative.native_eagle import Guess
from services.gpu_worker.speculative.native_medusa import vllms_names
from services.gpu_worker.weights.device_heads import DeviceHeads
from services.gpu_worker.weights.head_files import HeadFiles, mapped_token_ids


@dataclass(frozen=True, slots=True)
class GpuMedusaWeights:
    """Of each head. token_ids: int64, what the rows of the output heads stand for; None if those are the target's."""

    blocks: tuple[tuple[Product, ...], ...]
    heads: tuple[Product, ...]
    token_ids: torch.Tensor | None


def load_gpu_medusa(
    folder: Path, target: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[MedusaConfig, GpuMedusaWeights]:
    """ConfigError, WeightsError."""
    files = HeadFiles(folder)
    config = read_medusa(files.values, target)
    vllms_names(files, config)
    made, size, vocab_size = DeviceHeads(files, device, dtype), config.hidden_size, config.draft_vocab_size
    with torch.inference_mode(), memory_errors():
        blocks = tuple(
            tuple(
                made.linear([(f"blocks.{number}.layers.{block}", size)], size, config.block_bias)
                for block in range(config.num_blocks)
            )
            for number in range(config.num_heads)
        )
        if config.has_shared_head:
            heads = (made.output("lm_head", vocab_size, size),) * config.num_heads
        else:
            heads = tuple(made.output(f"lm_heads.{n}", vocab_size, size) for n in range(config.num_heads))
        ids = mapped_token_ids(files, vocab_size, config.vocab_size)
        weights = GpuMedusaWeights(blocks, heads, None if ids is None else ids.long().to(device))
    files.finish()
    return config, weights


class GpuMedusa:
    """Computes while the target does not."""

    def __init__(self, config: MedusaConfig, weights: GpuMedusaWeights, device: torch.device) -> None:
        self.num_heads = config.num_heads
        self._vocab_size = config.vocab_size
        self._weights = weights
        self._device = device

    def guess(self, sequences: Seq[Sequence], rows: torch.Tensor, counts: Seq[int]) -> list[list[Guess]]:
        """As `native_medusa.NativeMedusa.guess`."""
        going = [[i for i, count in enumerate(counts) if count > place]
                 for place in range(min(self.num_heads, max(counts)))]  # fmt: skip
        draws = [draw_rows([choice_of(sequences[i], place) for i in own]) for place, own in enumerate(going)]
        with torch.inference_mode(), memory_errors():
            sent = [[*made.tensors(), torch.tensor(own)] for made, own in zip(draws, going, strict=True)]
            there = upload([tensor for tensors in sent for tensor in tensors], self._device)
            drawn = [
                self._drawn(rows, place, draws[place], there[6 * place : 6 * place + 6]) for place in range(len(going))
            ]
            return guesses_of(drawn, going, len(sequences))

    def _drawn(
        self, rows: torch.Tensor, place: int, draws: DrawRows, there: Seq[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = rows.index_select(0, there[5])
        for block in self._weights.blocks[place]:
            rows = rows + F.silu(block(rows))
        logits = self._weights.heads[place](rows)
        return draw_drafted(logits, draws.with_tensors(there[:5]), self._weights.token_ids, self._vocab_size)
