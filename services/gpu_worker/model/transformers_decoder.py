"""Models that we have no description of, computed by transformers with our paged attention in its registry.

Slower than our own decoder, in float32, on torch. Nothing is run that a model's folder brings along: classes are
those of the installed package. A model whose tokens meet in any other way than through the registry is refused.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels.matmul_dense import DensePacker, DenseWeight, matmul_dense
from services.gpu_worker.attention_plan import Geometry
from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.config import ConfigError, LayerKind, ModelConfig
from services.gpu_worker.model.layers import attended
from services.gpu_worker.step_inputs import StepInputs, build_step_inputs
from services.gpu_worker.weights.safetensors import QUANTIZATION, folder_identity, json_object
from shared.protocol import SamplingParams

ATTENTION = "headrace_paged"
_CLASS = re.compile(r"[A-Za-z0-9_]{1,80}(ForCausalLM|LMHeadModel)")
_PROBE_TOKENS = 7
_TOLERANCE = 1e-3  # of logits, in their own spread


@dataclass(slots=True)
class _Step:
    """What a forward call hands down to every layer's attention."""

    inputs: StepInputs
    pool: KVPool
    window: int | None
    layers: list[int] = field(default_factory=list)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cap: float,
               window: int | None) -> torch.Tensor:  # fmt: skip
        """[1, H, N, D] each -> [1, N, H, D]."""
        self.layers.append(layer)
        if window is not None and window != self.window:
            raise ConfigError(f"sliding_window: layer {layer} has {window}, the configuration {self.window}")
        plans = self.inputs.plans if window is None else self.inputs.window_plans
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        return attended(q, k, v, self.pool.layers[layer], self.inputs, plans, scale, cap)[None]


def _paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, headrace_step: _Step | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if headrace_step is None or s_aux is not None or not getattr(module, "is_causal", True):
        raise ConfigError("its attention is of a kind that cannot be replaced")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = int(module.layer_idx)
    return headrace_step.attend(layer, query, key, value, scale, softcap or 0.0, sliding_window), None


class _PackedLinear(torch.nn.Module):
    """A linear layer whose rows do not depend on how many there are."""

    def __init__(self, weight: DenseWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed = weight
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self._packed.in_features)
        return matmul_dense(rows, self._packed, self._bias).view(*x.shape[:-1], self._packed.out_features)


class TransformersModel:
    """A folder, before its weights are loaded. ConfigError for what cannot be served like this."""

    def __init__(self, folder: Path, quantization: str = "none") -> None:
        if not folder.is_dir():
            raise ConfigError("model_impl: transformers reads Hugging Face folders alone")
        values = json_object(folder / "config.json")
        if quantization != "none" or values.get(QUANTIZATION) is not None:
            raise ConfigError("quantization is not possible with model_impl transformers")
        self._folder = folder
        package = _package()
        self._class = _model_class(values, package)
        self._config = self._class.config_class.from_dict(values)
        self.config = _sizes(self._config.get_text_config(decoder=True))
        parts = folder_identity(folder), package.__version__, ATTENTION
        self.identity = hashlib.sha256("-".join(parts).encode()).hexdigest()

    def decoder(self) -> TransformersDecoder:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # as in _package

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _paged_attention)
        try:
            model = self._class.from_pretrained(
                self._folder, config=self._config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
                attn_implementation="eager",
            )  # fmt: skip
            return TransformersDecoder(model.eval(), self.config)
        except ConfigError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, OSError) as e:
            reason = (str(e).splitlines() or [""])[0][:200]
            raise ConfigError(f"transformers cannot compute this model here: {type(e).__name__}: {reason}") from e


def _package() -> Any:
    try:
        import transformers  # seconds, and optional
    except ImportError as e:
        raise ConfigError("architectures we do not describe need the package transformers, which is missing") from e
    return transformers


def _model_class(values: dict[str, Any], package: Any) -> Any:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "none"
    found = getattr(package, name, None) if _CLASS.fullmatch(name) else None
    if found is None:
        raise ConfigError(f"architectures: {name} is known neither here nor to transformers {package.__version__}")
    if not found._supports_attention_backend or found._is_stateful:
        raise ConfigError(f"architectures: {name} does not attend through transformers' registry")
    return found


def _sizes(text: Any) -> ModelConfig:
    """What pools and plans of attention need; the rest is transformers' to know."""
    heads, hidden = text.num_attention_heads, text.hidden_size
    window = getattr(text, "sliding_window", None)
    return ModelConfig(
        vocab_size=text.vocab_size,
        hidden_size=hidden,
        intermediate_size=getattr(text, "intermediate_size", None) or hidden,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        norm_eps=1e-6,
        max_position_embeddings=text.max_position_embeddings,
        layers=(LayerKind(windowed=bool(window)),) * text.num_hidden_layers,
        sliding_window=window or None,
    )


class TransformersDecoder:
    """As `decoder.Decoder`."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self.config = config
        self._model = model
        with torch.inference_mode():
            ids = torch.arange(1, 1 + _PROBE_TOKENS) % config.vocab_size
            want = model(input_ids=ids[None], use_cache=False).logits[0]
            _pack_linears(model)
            model.set_attn_implementation(ATTENTION)
            self._probe(ids, want)

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """Write the K and V of all rows to the pool; the logits of the sample rows, float32 [S, vocab_size]."""
        return self._run(_Step(inputs, pool, self.config.sliding_window))

    def _run(self, step: _Step) -> torch.Tensor:
        inputs = step.inputs
        rows = inputs.sample_rows if inputs.sample_chunks else torch.zeros(1, dtype=torch.int64)
        logits: torch.Tensor = self._model(
            input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False,
            logits_to_keep=rows, headrace_step=step,
        ).logits[0]  # fmt: skip
        if logits.shape[0] != rows.shape[0]:  # this model's forward computes all of them
            logits = logits.index_select(0, rows)
        return logits[: inputs.sample_rows.shape[0]]

    def _probe(self, ids: torch.Tensor, want: torch.Tensor) -> None:
        """Whether tokens that come in two steps, in a cache, give what transformers gives by itself."""
        config, size = self.config, 16
        geometry = Geometry(
            1, size, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size,
            config.max_position_embeddings, window=config.sliding_window or 0,
        )  # fmt: skip
        pool = KVPool(
            num_blocks=1, block_size=size, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, dtype=torch.float32,
        )  # fmt: skip
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
        sequence = Sequence(
            sid="probe.0", epoch=1, choice=0, params=params, num_prompt_tokens=len(ids), token_ids=ids.tolist(),
            block_ids=[0],
        )  # fmt: skip
        first = len(ids) - 2
        for chunk in (Chunk(sequence, 0, first, True), Chunk(sequence, first, 2, True)):
            step = _Step(build_step_inputs([chunk], geometry), pool, config.sliding_window)
            got, row = self._run(step)[0], want[chunk.start + chunk.count - 1]
            if sorted(step.layers) != list(range(config.num_layers)):
                raise ConfigError("its layers do not all attend through transformers' registry")
            if not torch.allclose(got, row, rtol=0, atol=_TOLERANCE * max(1e-3, float(want.std()))):
                raise ConfigError("with paged attention its logits are others than by transformers alone")


def _pack_linears(model: Any) -> None:
    packer = DensePacker()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                bias = None if child.bias is None else child.bias.detach()
                setattr(module, name, _PackedLinear(packer.pack(child.weight.detach()), bias))
