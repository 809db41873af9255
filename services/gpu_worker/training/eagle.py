"""Heads that draft, as modules that learn: EAGLE-1 and EAGLE-3, one decoder layer over embedding and hidden rows.

Row t has the embedding of token t + 1 and what the target computed for token t, and foresees token t + 2. When it
drafts, a head reads its own rows further on; so it learns on them: pass k reads in row t what pass k - 1 left in row
t - 1, and attends to rows of the target up to t - k and to its own after these (EAGLE-3's training-time test).
Names of parameters are those of published checkpoints, see `speculative/head_files.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from services.gpu_worker.model.rope import Tables
from services.gpu_worker.speculative.head_config import EagleConfig


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


@dataclass
class Passes:
    """Keys and values of the passes so far, [B, KV heads, T, D] each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class Attention(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer
        into = layer.hidden_size * (2 if config.is_fused else 1)
        self._heads, self._kv_heads, self._dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self.q_proj = nn.Linear(into, self._heads * self._dim, bias=False)
        self.k_proj = nn.Linear(into, self._kv_heads * self._dim, bias=False)
        self.v_proj = nn.Linear(into, self._kv_heads * self._dim, bias=False)
        self.o_proj = nn.Linear(self._heads * self._dim, layer.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, angles: Tables, passes: Passes) -> torch.Tensor:
        """x [B, T, into]: of the pass after those."""
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self._dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _turned(q, angles), _turned(k, angles)
        repeat = self._heads // self._kv_heads
        passes.keys.append(k.repeat_interleave(repeat, dim=1))
        passes.values.append(v.repeat_interleave(repeat, dim=1))
        mixed = attend(q * self._dim**-0.5, passes)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def attend(q: torch.Tensor, passes: Passes) -> torch.Tensor:
    """q [B, H, T, D] of the last pass k: row t sees pass 0 up to row t - k, and of pass i > 0 its row t - k + i."""
    last, length = len(passes.keys) - 1, q.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-last)
    scores = (q @ passes.keys[0].transpose(2, 3)).masked_fill(~seen, float("-inf"))
    own = [(q * _later(passes.keys[i], last - i)).sum(-1, keepdim=True) for i in range(1, last + 1)]
    weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
    mixed = weights[..., :length] @ passes.values[0]
    for i in range(1, last + 1):
        mixed = mixed + weights[..., length + i - 1 : length + i] * _later(passes.values[i], last - i)
    return mixed


def _later(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Row t - count in row t, of [..., T, D]; zeros before the first."""
    return rows if count == 0 else F.pad(rows, (0, 0, count, 0))[..., : rows.shape[-2], :]


def _turned(x: torch.Tensor, angles: Tables) -> torch.Tensor:
    cos, signed_sin = (table[: x.shape[2]].to(x.dtype) for table in angles)
    return x * cos + x.roll(x.shape[3] // 2, dims=3) * signed_sin


class FeedForward(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, inner = config.layer.hidden_size, config.layer.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """EAGLE-3 norms embedding and row apart and reads both; EAGLE-1 reads their fusion as it is."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.norm_eps
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        if config.is_fused:
            self.input_layernorm = RMSNorm(size, eps)
            self.hidden_norm = RMSNorm(size, eps)

    def forward(self, embeds: torch.Tensor | None, x: torch.Tensor, angles: Tables, passes: Passes) -> torch.Tensor:
        into = x if embeds is None else torch.cat((self.input_layernorm(embeds), self.hidden_norm(x)), dim=-1)
        x = x + self.self_attn(into, angles, passes)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(nn.Module):
    """lm_head [draft_vocab_size, hidden_size], final_norm: the target's, to begin with; EAGLE-1 keeps the rows.

    What `fc` reads is multiplied by `scale` before, since a few of its columns are a thousand times as large as others;
    in files that is a part of fc."""

    def __init__(self, config: EagleConfig, lm_head: torch.Tensor, final_norm: torch.Tensor | None = None) -> None:
        super().__init__()
        size = config.layer.hidden_size
        self.config = config
        into = (len(config.tap_layers) if config.is_fused else 2) * size
        self.register_buffer("scale", torch.ones(into))
        if config.is_fused:
            self.fc = nn.Linear(into, size, bias=False)
            self.midlayer = Layer(config)
            self.norm = RMSNorm(size, config.layer.norm_eps)
            self.lm_head = nn.Linear(size, len(lm_head), bias=False)
            self.lm_head.weight.data.copy_(lm_head)
            if final_norm is not None:
                self.norm.weight.data.copy_(final_norm)
        else:
            self.fc = nn.Linear(into, size, bias=False)
            self.layers = nn.ModuleList([Layer(config)])
            self.register_buffer("_target_head", lm_head, persistent=False)

    def first_rows(self, taps: torch.Tensor) -> torch.Tensor:
        """[B, T, taps * hidden_size] -> what pass 0 reads."""
        out: torch.Tensor = self.fc(taps * self.get_buffer("scale")) if self.config.is_fused else taps
        return out

    def forward(self, embeds: torch.Tensor, rows: torch.Tensor, angles: Tables, passes: Passes) -> torch.Tensor:
        """[B, T, hidden_size] each -> what the next pass reads, a row later."""
        if self.config.is_fused:
            out: torch.Tensor = self.midlayer(embeds, rows, angles, passes)
            return out
        fused = self.fc(torch.cat((embeds, rows), dim=-1) * self.get_buffer("scale"))
        out = self.layers[0](None, fused, angles, passes)
        return out

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Of the draft vocabulary."""
        if self.config.is_fused:
            out: torch.Tensor = self.lm_head(self.norm(rows))
            return out
        return F.linear(rows, self.get_buffer("_target_head").to(rows.dtype))


def passes_of(
    head: EagleHead, embeds: torch.Tensor, taps: torch.Tensor, angles: Tables, count: int
) -> list[torch.Tensor]:
    """What each pass leaves, [B, T, hidden_size]: row t of all of them foresees token t + 2."""
    passes, rows, found = Passes([], []), head.first_rows(taps), []
    for _ in range(count):
        left = head(embeds, rows, angles, passes)
        found.append(left)
        rows = _later(left, 1)
    return found
