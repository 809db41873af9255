"""Published heads as the beginning of others: configuration, draft vocabulary, and weights as floats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from services.gpu_worker.model.config import ConfigError, ModelConfig
from services.gpu_worker.speculative.head_config import EagleConfig, MedusaConfig, last_layer, read_eagle, read_medusa
from services.gpu_worker.speculative.native_medusa import vllms_names
from services.gpu_worker.training.eagle import EagleHead
from services.gpu_worker.weights.head_files import HeadFiles, draft_token_ids, mapped_token_ids


@dataclass(frozen=True, slots=True)
class Beginning:
    """token_ids: int64, of the draft vocabulary. layers: what a head reads, and what its labels follow from."""

    config: EagleConfig | MedusaConfig
    token_ids: torch.Tensor
    layers: tuple[int, ...]
    files: HeadFiles

    def give(self, head: nn.Module) -> None:
        """Its parameters, each once: WeightsError names a tensor that has no place in it, or is missing."""
        for name, parameter in head.named_parameters():
            values = self.files.floats(name, tuple(parameter.shape))
            if name == "fc.weight" and isinstance(head, EagleHead):
                values = values / head.get_buffer("scale").cpu()
            parameter.data.copy_(values)
        if isinstance(head, EagleHead) and not head.config.is_fused and self.files.has("lm_head.weight"):
            self.files.matrix("lm_head.weight", *head.get_buffer("_target_head").shape)  # the target's, once more
        self.files.finish()


def begin_with(folder: Path, method: str, target: ModelConfig) -> Beginning:
    """method: of the heads to be trained. ConfigError or WeightsError where these cannot be their beginning."""
    files = HeadFiles(folder)
    if method == "medusa":
        medusa = read_medusa(files.values, target)
        if medusa.has_shared_head:
            raise ConfigError("original_lm_head: heads with one output head for all are not trained here")
        vllms_names(files, medusa)
        return Beginning(medusa, _ids(mapped_token_ids(files, medusa.draft_vocab_size, target.vocab_size), medusa),
                         medusa.tap_layers, files)  # fmt: skip
    eagle = read_eagle(files.values, "eagle3" if method == "eagle3" else "eagle", target)
    if eagle.norms_first or eagle.fc_bias:
        raise ConfigError("norm_before_residual, bias: heads that have them are not trained here")
    if not eagle.is_fused:
        return Beginning(eagle, torch.arange(target.vocab_size), eagle.tap_layers, files)
    files.rename("layers.0.", "midlayer.")
    ids = _ids(draft_token_ids(files, eagle.draft_vocab_size, target.vocab_size), eagle)
    return Beginning(eagle, ids, (*eagle.tap_layers, *last_layer(target.num_layers)), files)


def _ids(token_ids: torch.Tensor | None, config: EagleConfig | MedusaConfig) -> torch.Tensor:
    return torch.arange(config.draft_vocab_size) if token_ids is None else token_ids.long()
