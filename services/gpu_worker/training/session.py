"""A training run in its folder: what a later run goes on from, and what it must have been begun with."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.training.trainer import Trainer

STATE, TENSORS, TEXTS, ROWS = "state.json", "state.safetensors", "texts.jsonl", "rows.tmp"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a head follows from, with the time that it is given."""

    model: str  # identity of its files
    method: str
    draft_vocab_size: int
    prompts: str  # hash
    max_tokens: int
    places: int
    seed: int
    init_from: str = ""  # folder


class Session:
    """spent_s: by all runs so far."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        """ValueError names what another run in this folder was begun with."""
        self.folder = folder
        self._recipe = asdict(recipe)
        self._state: dict[str, Any] = {"recipe": self._recipe, "spent_s": 0.0, "num_steps": 0}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / STATE).exists():
            self._state = json.loads((folder / STATE).read_text())
            for name, value in self._state["recipe"].items():
                if self._recipe[name] != value:
                    raise ValueError(f"{folder} has a run with another {name}: {value}")

    @property
    def spent_s(self) -> float:
        return float(self._state["spent_s"])

    def save(self, spent_s: float, trainer: Trainer | None = None) -> None:
        """Whole or not at all."""
        if trainer is not None:
            tensors = {f"head.{name}": t.detach().cpu() for name, t in trainer.head.state_dict().items()}
            for name, parameter in trainer.head.named_parameters():
                moments = trainer.optimizer.state.get(parameter, {})
                tensors |= {f"{key}.{name}": t.cpu() for key, t in moments.items() if isinstance(t, torch.Tensor)}
            part = self.folder / f".{TENSORS}"
            save_file({name: t.contiguous() for name, t in tensors.items()}, part)
            os.replace(part, self.folder / TENSORS)
            self._state["num_steps"] = trainer.num_steps
        self._state["spent_s"] = spent_s
        part = self.folder / f".{STATE}"
        part.write_text(json.dumps(self._state, indent=2) + "\n")
        os.replace(part, self.folder / STATE)

    def restore(self, trainer: Trainer) -> None:
        """Where an earlier run has left it, if there was one."""
        if not (self.folder / TENSORS).exists():
            return
        tensors = load_file(self.folder / TENSORS)
        trainer.num_steps = int(self._state["num_steps"])
        trainer.head.load_state_dict({n.removeprefix("head."): t for n, t in tensors.items() if n.startswith("head.")})
        for name, parameter in trainer.head.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            moments = {key: tensors[f"{key}.{name}"] for key in keys if f"{key}.{name}" in tensors}
            if moments:
                trainer.optimizer.state[parameter] = {
                    key: t if key == "step" else t.to(parameter.device) for key, t in moments.items()
                }
