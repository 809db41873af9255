"""Tiny random checkpoints, as transformers writes them, and the engines and sequences to run them with."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import transformers

from services.gpu_worker.batch import Chunk, Engine, SampledToken, Sequence
from shared.protocol import SamplingParams

VOCAB_SIZE = 300
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 6}),
}


def build(name: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A random model; its weights are large enough that greedy text does not fall into a loop at once."""
    architecture, settings = ARCHITECTURES[name]
    config = getattr(transformers, f"{architecture}Config")(**(SIZES | {"initializer_range": 0.2} | settings | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    return model


def save(name: str, folder: Path, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    model = build(name, seed, **changes)
    model.save_pretrained(folder)
    return model


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 40, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Runner:
    """Gives sequences blocks of the engine's pool, scattered on purpose, and steps them."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        order = torch.randperm(engine.info.num_blocks, generator=torch.Generator().manual_seed(seed))
        self._free: list[int] = order.tolist()

    def sequence(self, prompt: Seq[int], num_output: int, choice: int = 0, **params: Any) -> Sequence:
        settings: dict[str, Any] = {"max_tokens": num_output, "temperature": 0.0, "seed": 1} | params
        num_blocks = -(-(len(prompt) + num_output) // self.engine.info.block_size)
        block_ids, self._free = self._free[:num_blocks], self._free[num_blocks:]
        assert len(block_ids) == num_blocks, "the test's pool is too small"
        return Sequence(
            sid=f"s{block_ids[0]}.{choice}", epoch=1, choice=choice, params=SamplingParams(**settings),
            num_prompt_tokens=len(prompt), token_ids=list(prompt), block_ids=block_ids,
        )  # fmt: skip

    def free(self, sequence: Sequence) -> None:
        self._free += sequence.block_ids

    def step(self, chunks: Seq[Chunk]) -> list[SampledToken | None]:
        """One step, and what the running set does with its results."""
        results = self.engine.step(chunks)
        for chunk, token in zip(chunks, results, strict=True):
            chunk.seq.num_computed = chunk.start + chunk.count
            if token is not None:
                chunk.seq.token_ids.append(token.token_id)
        return results

    def run(self, sequences: Seq[Sequence], prefill_chunk: int = 512) -> list[list[SampledToken]]:
        """All of them together until each has max_tokens; prompts in chunks, mixed with the others' decoding."""
        results: dict[int, list[SampledToken]] = {id(s): [] for s in sequences}
        while unfinished := [s for s in sequences if s.num_output_tokens < s.params.max_tokens]:
            chunks = [next_chunk(s, prefill_chunk) for s in unfinished]
            for chunk, token in zip(chunks, self.step(chunks), strict=True):
                if token is not None:
                    results[id(chunk.seq)].append(token)
        return [results[id(s)] for s in sequences]


def next_chunk(sequence: Sequence, prefill_chunk: int) -> Chunk:
    left = len(sequence.token_ids) - sequence.num_computed
    count = min(left, prefill_chunk)
    return Chunk(sequence, sequence.num_computed, count, sample=count == left)


def ids_of(results: Seq[Seq[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in tokens] for tokens in results]
