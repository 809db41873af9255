"""What layers read, as heads that draft are given it: the same by both engines and transformers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch

from services.gpu_worker.batch import Chunk
from tests.gpu_worker.any_engine import AnyEngine, load_native, load_torch
from tests.gpu_worker.tiny_models import Runner, prompts, save

LAYERS = (0, 2, 3, 4)  # of three: what the last leaves, and that as the output head reads it


def rows_of(engine: AnyEngine, text: list[int], cuts: list[int]) -> torch.Tensor:
    seq = Runner(engine).sequence(text, 1)
    ends = [*cuts, len(text)]
    parts = [engine.hidden_rows(Chunk(seq, start, end - start, False), LAYERS)
             for start, end in zip([0, *cuts], ends, strict=True)]  # fmt: skip
    return torch.cat(parts)


@pytest.mark.parametrize("load, tolerance", [(load_torch, 1e-4), (load_native, 2e-2)])
def test_rows_are_those_of_transformers(tmp_path: Path, load: type[AnyEngine], tolerance: float) -> None:
    model = save("llama", tmp_path)
    text = prompts(1, low=30, high=31)[0]
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        last: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
        model(torch.tensor([text]))
        hook.remove()
    want = torch.stack([states[0][0], states[2][0], last[0][0], states[3][0]], dim=1)
    got = rows_of(load(tmp_path, kv_cache_bytes=8 << 20), text, [])
    assert got.shape == want.shape
    for number in range(len(LAYERS)):
        error = (got[:, number] - want[:, number]).norm() / want[:, number].norm()
        assert error < tolerance, (LAYERS[number], error)


def test_native_rows_do_not_depend_on_chunks_or_mates(tmp_path: Path) -> None:
    save("llama", tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=8 << 20)
    text = prompts(1, low=40, high=41)[0]
    whole = rows_of(engine, text, [])
    assert torch.equal(rows_of(engine, text, [1, 2, 19, 37]), whole)


def test_taps_are_of_the_rows_of_each_step_and_change_no_token(tmp_path: Path) -> None:
    save("llama", tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=8 << 20)
    texts = prompts(3, low=5, high=20)
    runner = Runner(engine)
    want = runner.run([runner.sequence(text, 6) for text in texts])
    engine.decoder.tap_layers = (2, 4)
    runner = Runner(engine)
    assert runner.run([runner.sequence(text, 6) for text in texts]) == want


def test_a_native_step_stands_if_what_its_layers_have_read_cannot_be_kept(tmp_path: Path) -> None:
    save("llama", tmp_path)
    engine = load_native(tmp_path, kv_cache_bytes=8 << 20)
    runner, text = Runner(engine), prompts(1)[0]
    want = runner.run([runner.sequence(text, 4)])

    def take(chunks: Seq[Chunk], rows: torch.Tensor) -> None:
        raise MemoryError("no more")

    engine.tap((1,), take)
    assert runner.run([runner.sequence(text, 4)]) == want
