"""Medusa heads as modules that learn: head i foresees the token 2 + i places on from what the output head reads.

Names of parameters are those of vLLM's checkpoints, see `speculative/head_files.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from services.gpu_worker.speculative.head_config import MedusaConfig


class Blocks(nn.Module):
    """Residual blocks that change nothing to begin with."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=config.block_bias) for _ in range(config.num_blocks)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """lm_head [draft_vocab_size, hidden_size]: the target's rows, with which all output heads begin."""

    def __init__(self, config: MedusaConfig, lm_head: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList([Blocks(config) for _ in range(config.num_heads)])
        self.lm_heads = nn.ModuleList(
            [nn.Linear(config.hidden_size, len(lm_head), bias=False) for _ in range(config.num_heads)]
        )
        for parameter in self.lm_heads.parameters():
            parameter.data.copy_(lm_head)

    def logits(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        """Of the draft vocabulary, by one of the heads."""
        out: torch.Tensor = self.lm_heads[number](self.blocks[number](rows))
        return out
