"""Texts with what the target's layers read on them: kept in a file, since they are many times the texts' size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from services.gpu_worker.batch import Chunk, EngineInfo, Sequence
from services.gpu_worker.training.self_text import Text
from shared.protocol import SamplingParams

CHUNK_TOKENS = 256
DTYPE = torch.bfloat16  # what some layers read is beyond float16


class Teacher(Protocol):
    info: EngineInfo

    def hidden_rows(self, chunk: Chunk, layers: tuple[int, ...]) -> torch.Tensor: ...


def append_text(path: Path, text: Text) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(text)) + "\n")


def read_texts(path: Path) -> list[Text]:
    """Those that are there whole, by number: of a process that was killed the last line may be a part."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    texts = [Text(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(texts, key=lambda text: text.number)


@dataclass(frozen=True, slots=True)
class Example:
    """rows [tokens, layers, hidden_size]: of each token."""

    text: Text
    rows: torch.Tensor


def teach(
    teacher: Teacher, texts: Seq[Text], layers: tuple[int, ...], hidden_size: int, path: Path,
    told: Callable[[int], None],
) -> list[Example]:  # fmt: skip
    """The file is made anew; told of tokens as they are computed."""
    path.unlink(missing_ok=True)
    num_tokens = sum(len(text.token_ids) for text in texts)
    row = len(layers) * hidden_size
    rows = torch.from_file(str(path), shared=True, size=num_tokens * row, dtype=DTYPE).view(num_tokens, len(layers), -1)
    examples, first = [], 0
    for text in texts:
        own = rows[first : first + len(text.token_ids)]
        for start, part in _parts(teacher, text, layers):
            own[start : start + len(part)] = part
        told(len(text.token_ids))
        examples.append(Example(text, own))
        first += len(text.token_ids)
    return examples


def _parts(teacher: Teacher, text: Text, layers: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    size, length = teacher.info.block_size, len(text.token_ids)
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    seq = Sequence(
        sid="", epoch=0, choice=0, params=params, num_prompt_tokens=length, token_ids=text.token_ids,
        block_ids=list(range(-(-length // size))),
    )  # fmt: skip
    for start in range(0, length, CHUNK_TOKENS):
        yield start, teacher.hidden_rows(Chunk(seq, start, min(CHUNK_TOKENS, length - start), False), layers)
