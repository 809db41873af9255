"""Medusa heads on native ops: from what the output head read for one token, each guesses a token further on.

A head is residual blocks and an output head, which is a decoder without layers: so it draws with the request's noise
where the target does, and agrees with it as often as it can. Heads do not see each other's guesses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from kernels.matmul_a8 import matmul_a8
from kernels.packed_weight import PackedWeight
from kernels.quantize_a8 import quantize_a8
from services.gpu_worker.batch import Sequence
from services.gpu_worker.model.config import LayerKind, ModelConfig, RopeConfig
from services.gpu_worker.model.native_decoder import NativeDecoder
from services.gpu_worker.native_inputs import NativeInputs
from services.gpu_worker.speculative.head_config import MedusaConfig, read_medusa
from services.gpu_worker.speculative.native_eagle import Guess, noise_of
from services.gpu_worker.weights.head_files import HeadFiles, mapped_token_ids
from services.gpu_worker.weights.native_loader import NativeLinear, NativeWeights

Block = tuple[PackedWeight, torch.Tensor | None]  # and its bias


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Of each head. token_ids: int32, what the rows of the output heads stand for; None if those are the target's."""

    blocks: tuple[tuple[Block, ...], ...]
    heads: tuple[NativeLinear, ...]
    token_ids: torch.Tensor | None


def load_medusa(folder: Path, target: ModelConfig) -> tuple[MedusaConfig, MedusaWeights]:
    """ConfigError, WeightsError."""
    files = HeadFiles(folder)
    config = read_medusa(files.values, target)
    vllms_names(files, config)
    blocks = tuple(_blocks(files, config, number) for number in range(config.num_heads))
    size, vocab_size = config.hidden_size, config.draft_vocab_size
    if config.has_shared_head:
        heads = (NativeLinear((files.matrix("lm_head.weight", vocab_size, size),)),) * config.num_heads
    else:
        names = [f"lm_heads.{number}.weight" for number in range(config.num_heads)]
        heads = tuple(NativeLinear((files.matrix(name, vocab_size, size),)) for name in names)
    weights = MedusaWeights(blocks, heads, mapped_token_ids(files, vocab_size, config.vocab_size))
    files.finish()
    return config, weights


def vllms_names(files: HeadFiles, config: MedusaConfig) -> None:
    """FasterDecoding's names become vLLM's, which may call a shared output head the first."""
    files.rename("medusa_heads.", "")
    for number in range(config.num_heads):
        for block in range(config.num_blocks):
            files.rename(f"{number}.{block}.linear.", f"blocks.{number}.layers.{block}.")
        files.rename(f"{number}.{config.num_blocks}.", f"lm_heads.{number}.")
    if config.has_shared_head:
        files.rename("lm_heads.0.", "lm_head.")


def _blocks(files: HeadFiles, config: MedusaConfig, number: int) -> tuple[Block, ...]:
    size, found = config.hidden_size, []
    for block in range(config.num_blocks):
        at = f"blocks.{number}.layers.{block}"
        bias = files.vector(f"{at}.bias", size)[:size] if config.block_bias else None
        found.append((files.matrix(f"{at}.weight", size, size), bias))
    return tuple(found)


class NativeMedusa:
    """Computes while the target does not: both use one pool of threads."""

    def __init__(self, config: MedusaConfig, weights: MedusaWeights, target: NativeDecoder) -> None:
        self.num_heads = config.num_heads
        self._weights = weights
        self._library, self._pool = target.native
        layout = no_layers(config)
        self._heads = [
            NativeDecoder(
                layout, NativeWeights(target.weights.embedding, (), None, head, token_ids=weights.token_ids),
                self._library, pool=self._pool, num_blocks=1, block_size=16, max_model_len=1,
            )
            for head in weights.heads
        ]  # fmt: skip
        self._places = torch.arange(config.vocab_size)  # of tokens, in the draft vocabulary
        if weights.token_ids is not None:
            self._places[weights.token_ids.long()] = torch.arange(config.draft_vocab_size)

    def guess(self, sequences: Seq[Sequence], rows: torch.Tensor, counts: Seq[int]) -> list[list[Guess]]:
        """rows [sequences, hidden_size]: what the output head read for the last token but one of each. At most `counts`
        tokens that may follow; fewer where a head has come to no number."""
        found: list[list[Guess]] = [[] for _ in sequences]
        for place in range(min(self.num_heads, max(counts))):
            going = [i for i, count in enumerate(counts) if count > place == len(found[i])]
            if not going:
                break
            for i, guess in zip(going, self._draw([sequences[i] for i in going], rows[going], place), strict=True):
                if guess.token_id >= 0:
                    found[i].append(guess)
        return found

    def _draw(self, sequences: Seq[Sequence], rows: torch.Tensor, place: int) -> list[Guess]:
        for weight, bias in self._weights.blocks[place]:
            out = matmul_a8(quantize_a8(rows, self._library), weight, self._library, self._pool)
            rows = rows + F.silu(out if bias is None else out + bias)
        num = len(sequences)
        noise = {n: own for n, seq in enumerate(sequences) if (own := noise_of(seq, place)) is not None}
        spans = [number for n in range(num) for number in (n, 1, 0, n)]
        inputs = NativeInputs([0] * num, [0] * num, [0] * num, spans, [0] * num, list(range(num)), noise, [], [])
        run = self._heads[place].run(inputs, rows.contiguous())
        drawn = run.wait()
        logits = run.logits
        places = self._places[torch.tensor(drawn)]  # of -1 any
        logprobs = logits[range(num), places] - logits.logsumexp(-1)
        return [Guess(token_id, logprob) for token_id, logprob in zip(drawn, logprobs.tolist(), strict=True)]


def no_layers(config: MedusaConfig) -> ModelConfig:
    """Of a decoder whose weights have none: rows go to the output head as they are."""
    return ModelConfig(
        vocab_size=config.draft_vocab_size, hidden_size=config.hidden_size, intermediate_size=config.hidden_size,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=config.hidden_size, norm_eps=1e-5,
        max_position_embeddings=1, layers=(LayerKind(),), rope=RopeConfig(theta=10000.0), tied=False,
    )  # fmt: skip
