"""Heads with random weights for a tiny model, and what they read."""

from __future__ import annotations

from pathlib import Path

import torch

from services.gpu_worker.batch import Chunk
from services.gpu_worker.commands import train_heads
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.model.rope import rope_tables
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative.head_config import EagleConfig, MedusaConfig, eagle_like, last_layer
from services.gpu_worker.training import self_text
from services.gpu_worker.training.corpus import Example, teach
from services.gpu_worker.training.eagle import EagleHead
from services.gpu_worker.training.medusa import MedusaHeads
from services.gpu_worker.training.publish import publish
from services.gpu_worker.training.self_text import Text
from services.gpu_worker.training.trainer import Batch, Batcher, Target, Trainer, frequent_tokens
from services.gpu_worker.weights.loader import open_source
from tests.gpu_worker.any_engine import load_gpu, load_native
from tests.gpu_worker.tiny_models import Runner, save

DRAFT_VOCAB_SIZE = 96
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
         "head_dim": 16}  # fmt: skip


def save_tiny(folder: Path) -> None:
    save("llama", folder, **SIZES)


def load_tiny(folder: Path) -> NativeEngine:
    save_tiny(folder)
    return load_native(folder, kv_cache_bytes=8 << 20)


def load_tiny_gpu(folder: Path) -> GpuEngine:
    save_tiny(folder)
    return load_gpu(folder, kv_cache_bytes=8 << 20)


def random_head(kind: str, folder: Path, seed: int = 0) -> tuple[EagleHead, Target]:
    """For the model in a folder."""
    source = open_source(folder)
    config: EagleConfig = eagle_like("eagle3" if kind == "eagle3" else "eagle", source.config, DRAFT_VOCAB_SIZE)
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = torch.empty(source.shapes["embedding.weight"]), torch.empty(source.shapes["head.weight"])
    source.read_into("embedding.weight", embedding)
    source.read_into("head.weight", lm_head)
    ids = torch.arange(source.config.vocab_size)
    if kind == "eagle3":
        ids = torch.randperm(source.config.vocab_size, generator=generator)[:DRAFT_VOCAB_SIZE].sort().values
    target = Target(embedding, lm_head[ids], ids, rope_tables(config.layer, 256))
    head = EagleHead(config, target.lm_head)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.1, generator=generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    head.get_buffer("scale").uniform_(0.5, 2.0, generator=generator)
    return head, target


def published_medusa(folder: Path, to: Path, num_heads: int = 3, num_blocks: int = 2) -> MedusaHeads:
    config = open_source(folder).config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(config.vocab_size, generator=generator)[:DRAFT_VOCAB_SIZE].sort().values
    medusa = MedusaConfig(config.hidden_size, config.vocab_size, DRAFT_VOCAB_SIZE, num_heads,
                          last_layer(config.num_layers), num_blocks)  # fmt: skip
    heads = MedusaHeads(medusa, torch.zeros(DRAFT_VOCAB_SIZE, config.hidden_size))
    for parameter in heads.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    publish(heads, ids, to, "float16", {})
    return heads


def published(kind: str, folder: Path, to: Path, dtype: str = "float16") -> tuple[EagleHead, Target]:
    head, target = random_head(kind, folder)
    publish(head, target.token_ids, to, dtype, {})
    return head, target


def trained(kind: str, engine: NativeEngine, model: Path, texts: list[list[int]], to: Path, num_steps: int = 4) -> None:
    """Published after so many steps of our own trainer, on what the model writes after these texts."""
    written = [*self_text.write(engine, dict(enumerate(texts)), eos_token_ids=(), max_tokens=12, concurrency=4, seed=0)]
    config, layers = train_heads.new_head(kind, engine.config, 256, 3)
    examples = teach(engine, written, layers, engine.config.hidden_size, to.parent / f"{to.name}.rows", lambda n: None)
    ids = frequent_tokens([text.token_ids for text in written], 256, engine.config.vocab_size)
    target = train_heads.target_of(open_source(model), ids, torch.device("cpu"))
    head = train_heads.module_of(config, target, examples)
    losses: list[float] = []
    trainer = Trainer(head, target, Batcher(target, torch.device("cpu")), 2, 0)
    trainer.run(examples, lambda: 1.0 - len(losses) / num_steps, losses.append)
    assert trainer.num_steps == num_steps
    publish(head, ids, to, "int4", {})


def read_rows(engine: NativeEngine | GpuEngine, token_ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    seq = Runner(engine).sequence(token_ids, 1)
    return engine.hidden_rows(Chunk(seq, 0, len(token_ids), False), layers)


def batch_of(target: Target, token_ids: list[int], rows: torch.Tensor) -> Batch:
    return Batcher(target, torch.device("cpu")).batch([Example(Text(0, 1, token_ids), rows)])
