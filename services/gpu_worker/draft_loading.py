"""The engine of a draft model beside the target's: with as many blocks, and the target's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.gpu_worker.batch import Engine, EngineInfo
from services.gpu_worker.engines import cpu_kind, load_engine
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.model.config import ConfigError, ModelConfig
from services.gpu_worker.planning import Limits, cpu_block_bytes
from services.gpu_worker.speculative.vocab_map import MappedEngine, map_vocabularies
from services.gpu_worker.weights.loader import open_source
from shared import model_source, speculative_config
from shared.model_source import ModelSource
from shared.settings import WorkerSettings
from shared.vocabulary import Vocabulary, read_vocabulary

KEY = "speculative_config: model"


@dataclass(frozen=True, slots=True)
class Draft:
    """What is asked for. kind: of the engine, as the target's; on a CPU. max_model_len: the longest context that is
    served; the model's own may be shorter."""

    source: ModelSource
    kind: str
    cache_dir: Path
    num_threads: int
    block_size: int
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None

    def block_bytes(self) -> int:
        """What each block of the target takes more."""
        try:
            config = open_source(self.source.path, self.quantization).config
            limits = Limits(self.block_size, 1, 1, self._length(config), self.kv_cache_dtype)
            return cpu_block_bytes(config, self.kind, limits)
        except ConfigError as e:
            raise ConfigError(f"{KEY}: {e}") from None

    def _length(self, config: ModelConfig) -> int:
        longest = config.max_position_embeddings
        return min(self.max_model_len or longest, longest)

    def load(self, target: ModelSource, info: EngineInfo) -> Engine:
        """info: of the target's engine. ConfigError where it cannot guess for that."""
        try:
            length = self._length(open_source(self.source.path, self.quantization).config)
            engine = load_engine(
                self.kind, self.source.path, self.cache_dir, num_threads=self.num_threads, num_blocks=info.num_blocks,
                block_size=self.block_size, max_model_len=length, kv_cache_dtype=self.kv_cache_dtype,
                quantization=self.quantization,
            )  # fmt: skip
        except ConfigError as e:
            raise ConfigError(f"{KEY}: {e}") from None
        if self.source.path.resolve() == target.path.resolve():
            return engine
        mapped = map_vocabularies(*_vocabularies(target, self.source), info.vocab_size, engine.info.vocab_size)
        assert not isinstance(engine, GpuEngine)
        return engine if mapped is None else MappedEngine(engine, mapped)


def draft_of(own: WorkerSettings, kind: str, num_threads: int, cache_dir: Path, on_device: bool) -> Draft | None:
    """Where `--speculative-config` names a model; that may be a download. ConfigError if it cannot guess here."""
    config = speculative_config.parse(own.speculative_config)
    if config is None or config.method != "draft_model":
        return None
    if on_device:
        raise ConfigError("speculative_config: method: draft_model computes on a CPU only; --device cpu serves it")
    source = model_source.resolve(config.model, cache_dir)
    return Draft(source, cpu_kind(kind, cache_dir), cache_dir, num_threads, own.block_size, own.kv_cache_dtype,
                 config.quantization, own.max_model_len or None)  # fmt: skip


def _vocabularies(target: ModelSource, draft: ModelSource) -> tuple[Vocabulary, Vocabulary]:
    try:
        return read_vocabulary(target), read_vocabulary(draft)
    except (ValueError, KeyError, OSError) as e:
        raise ConfigError(f"{KEY}: its vocabulary cannot be compared with the served model's: {e!r}") from None
