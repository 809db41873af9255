"""The engine of a draft model beside the target's: with as many blocks, and the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from services.gpu_worker.batch import Engine, EngineInfo, SampledToken
from services.gpu_worker.device import DeviceOptions
from services.gpu_worker.device_sampler import draw
from services.gpu_worker.engines import AnyEngine, cpu_kind, load_engine
from services.gpu_worker.gpu_engine import DEFAULT_LIMITS, GpuEngine, StepLimits
from services.gpu_worker.gpu_memory import Beside
from services.gpu_worker.model.config import ConfigError, ModelConfig
from services.gpu_worker.planning import Limits, cpu_block_bytes, draft_beside, draft_tokens
from services.gpu_worker.sampler import Draw
from services.gpu_worker.speculative.vocab_map import MappedEngine, map_vocabularies
from services.gpu_worker.warm_up import sizes_on, warm_up_engine
from services.gpu_worker.weights.loader import open_source
from services.gpu_worker.weights.outline import outline
from shared import model_source, speculative_config
from shared.model_source import ModelSource
from shared.settings import WorkerSettings
from shared.vocabulary import Vocabulary, read_vocabulary

KEY = "speculative_config: model"


@dataclass(frozen=True, slots=True)
class Draft:
    """What is asked for. kind: of the engine on a CPU, as the target's. max_model_len: the longest context that is
    served; the model's own may be shorter."""

    source: ModelSource
    kind: str
    cache_dir: Path
    num_threads: int
    block_size: int
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None

    def block_bytes(self, is_native: bool = True) -> int:
        """What each block of the target takes more, on a CPU, whichever engine computes that."""
        try:
            config = open_source(self.source.path, self.quantization).config
            limits = Limits(self.block_size, 1, 1, self._length(config), self.kv_cache_dtype)
            return cpu_block_bytes(config, cpu_kind(self.kind, self.cache_dir), limits)
        except ConfigError as e:
            raise ConfigError(f"{KEY}: {e}") from None

    def on_card(self, device: torch.device, limits: StepLimits, options: DeviceOptions) -> Beside:
        try:
            found = outline(self.source.path, self.quantization)
            own = Limits(self.block_size, limits.max_num_batched_tokens, limits.max_num_seqs, self.max_model_len,
                         self.kv_cache_dtype, dtype=options.dtype)  # fmt: skip
            return draft_beside(found, own, device)
        except ConfigError as e:
            raise ConfigError(f"{KEY}: {e}") from None

    def _length(self, config: ModelConfig) -> int:
        longest = config.max_position_embeddings
        return min(self.max_model_len or longest, longest)

    def load(
        self, target: ModelSource, info: EngineInfo, device: torch.device | None = None,
        limits: StepLimits = DEFAULT_LIMITS, options: DeviceOptions | None = None,
    ) -> Engine:  # fmt: skip
        """info: of the target's engine; where a GPU computes that, this too, with the others. ConfigError where it
        cannot guess for that."""
        try:
            length = self._length(open_source(self.source.path, self.quantization).config)
            engine = self._engine(info, length, device, limits, options)
        except ConfigError as e:
            raise ConfigError(f"{KEY}: {e}") from None
        if self.source.path.resolve() == target.path.resolve():
            return engine
        mapped = map_vocabularies(*_vocabularies(target, self.source), info.vocab_size, engine.info.vocab_size)
        if mapped is None:
            return engine
        if isinstance(engine, GpuEngine):
            return MappedEngine(engine, mapped, engine.device, draw_on_device)
        return MappedEngine(engine, mapped)

    def _engine(
        self, info: EngineInfo, length: int, device: torch.device | None, limits: StepLimits,
        options: DeviceOptions | None,
    ) -> AnyEngine:  # fmt: skip
        own = StepLimits(draft_tokens(limits.max_num_seqs), limits.max_num_seqs, limits.memory_share)
        kind = "auto" if info.on_card else cpu_kind(self.kind, self.cache_dir)
        engine = load_engine(
            kind, self.source.path, self.cache_dir, num_threads=self.num_threads, num_blocks=info.num_blocks,
            block_size=self.block_size, max_model_len=length, kv_cache_dtype=self.kv_cache_dtype,
            quantization=self.quantization, device=device if info.on_card else None, needs_device=info.on_card,
            limits=own, options=options if info.on_card else None,
        )  # fmt: skip
        if isinstance(engine, GpuEngine):
            warm_up_engine(engine, sizes_on(engine.device))
        return engine


def draw_on_device(logits: torch.Tensor, draws: Seq[Draw]) -> list[SampledToken | None]:
    with torch.inference_mode():
        return draw(logits, draws).wait()


def draft_of(own: WorkerSettings, kind: str, num_threads: int, cache_dir: Path) -> Draft | None:
    """Where `--speculative-config` names a model; that may be a download."""
    config = speculative_config.parse(own.speculative_config, is_native=False)
    if config is None or config.method != "draft_model":
        return None
    source = model_source.resolve(config.model, cache_dir)
    return Draft(source, kind, cache_dir, num_threads, own.block_size, own.kv_cache_dtype, config.quantization,
                 own.max_model_len or None)  # fmt: skip


def _vocabularies(target: ModelSource, draft: ModelSource) -> tuple[Vocabulary, Vocabulary]:
    try:
        return read_vocabulary(target), read_vocabulary(draft)
    except (ValueError, KeyError, OSError) as e:
        raise ConfigError(f"{KEY}: its vocabulary cannot be compared with the served model's: {e!r}") from None
