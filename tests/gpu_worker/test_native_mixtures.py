"""P2 in mixtures drawn at random: chunks, trees of drafts and single rows of several sequences in one step have the
bits of steps with one row on one thread, at every edge of a tile and of a split of keys."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.native.build import Isa
from services.gpu_worker.batch import Chunk, Sequence
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.native_inputs import build_native_inputs
from services.gpu_worker.speculative.draft import NO_DRAFT, ROOT, Draft
from tests.gpu_worker.tiny_models import Runner, prompts, save
from tests.kernels.native_libraries import ISAS, library_for
from tests.kernels.threads import torch_threads

LENGTHS = (1, 2, 17, 63, 64, 65, 511, 512, 513, 576, 1025, 1300)
GUESSES = (7, 8)  # few, so that paths come again
MOST_ROWS, MOST_GUESSES, DEPTH = 20, 14, 4
NUM_STEPS = 30

Guessed = tuple[int, ...]
CASES: list[tuple[Isa, dict[str, Any]]] = [
    *((isa, {}) for isa in ISAS),
    *((isa, {"kv_cache_dtype": "int8", "block_size": 8}) for isa in (ISAS[0], ISAS[-1])),
    (ISAS[0], {"block_size": 1}),
    (ISAS[0], {"block_size": 64, "kv_cache_dtype": "int8"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save("llama", folder, max_position_embeddings=2048, num_hidden_layers=2)
    return folder


class Alone:
    """Logits of each row by itself, computed when they are first asked for."""

    def __init__(self, engine: NativeEngine, runner: Runner, texts: list[list[int]]) -> None:
        self._engine = engine
        self._texts = [runner.sequence(text, DEPTH) for text in texts]
        self._known: dict[tuple[int, int, Guessed], torch.Tensor] = {}
        engine.decoder.set_num_threads(1)
        for seq in self._texts:
            engine.step([whole(seq)])

    def row(self, text: int, position: int, path: Guessed) -> torch.Tensor:
        """Of a token of the text, or of the last one of a path behind it."""
        if (text, position, path) not in self._known:
            seq = self._texts[text]
            own = replace(seq, token_ids=[*seq.token_ids, *path])
            self._engine.decoder.set_num_threads(1)
            for place in range(len(seq.token_ids), position):  # another path may lie there
                logits(self._engine, [Chunk(own, place, 1, sample=True)])
            self._known[text, position, path] = logits(self._engine, [Chunk(own, position, 1, sample=True)])[0]
        return self._known[text, position, path]


def whole(seq: Sequence) -> Chunk:
    return Chunk(seq, 0, len(seq.token_ids), sample=False)


def logits(engine: NativeEngine, chunks: list[Chunk]) -> torch.Tensor:
    inputs = build_native_inputs(chunks, engine._geometry)
    every_row = replace(inputs, sample_rows=list(range(len(inputs.token_ids))))
    return engine.decoder.forward(every_row)[0].clone()


def any_draft(rng: random.Random) -> Draft:
    ids: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for _ in range(rng.choice((0, 0, 1, 3, MOST_GUESSES))):
        parent = rng.choice([ROOT, *(p for p, depth in enumerate(depths) if depth < DEPTH - 1)])
        parents.append(parent)
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        ids.append(rng.choice(GUESSES))
    return Draft(tuple(ids), tuple(parents)) if ids else NO_DRAFT


def any_chunk(seq: Sequence, rng: random.Random) -> Chunk:
    count = min(rng.choice((1, 1, 1, 2, 8, 9, MOST_ROWS)), len(seq.token_ids))
    return Chunk(seq, len(seq.token_ids) - count, count, sample=True, draft=any_draft(rng))


@pytest.mark.parametrize(("isa", "settings"), CASES, ids=lambda value: value.name if isinstance(value, Isa) else None)
def test_rows_of_mixtures_are_those_alone(folder: Path, isa: Isa, settings: dict[str, Any]) -> None:
    with torch_threads(1):
        engine = NativeEngine.load(folder, library_for(isa), num_threads=1, kv_cache_bytes=16 << 20, **settings)
    texts = [prompts(1, seed=n, low=n, high=n + 1)[0] for n in LENGTHS]
    runner, rng = Runner(engine), random.Random(str(settings))
    alone = Alone(engine, runner, texts)
    sequences = [runner.sequence(text, MOST_GUESSES) for text in texts]
    engine.step([whole(seq) for seq in sequences])
    for _ in range(NUM_STEPS):
        chosen = rng.sample(range(len(texts)), rng.choice((1, 1, 2, 3, 7)))
        chunks = [any_chunk(sequences[text], rng) for text in chosen]
        num_threads = rng.choice((1, 2, 3, 5))
        engine.decoder.set_num_threads(num_threads)
        got = iter(logits(engine, chunks))
        for text, chunk in zip(chosen, chunks, strict=True):
            paths: list[Guessed] = [()] * chunk.count + [tuple(chunk.draft.ids_to(p)) for p in range(len(chunk.draft))]
            for position, path in zip(chunk.positions, paths, strict=True):
                assert torch.equal(next(got), alone.row(text, position, path)), (text, position, path, num_threads)
