"""EAGLE heads on native ops, and on a GPU's, against the modules that learn, which are the specification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.gumbel import NoiseKey, gumbel_noise_at
from services.gpu_worker.batch import Sequence
from services.gpu_worker.cuda_graphs import RECORDED_AFTER
from services.gpu_worker.gpu_engine import GpuEngine
from services.gpu_worker.heads_loading import Heads
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative import gpu_eagle
from services.gpu_worker.speculative.gpu_eagle import GpuEagle
from services.gpu_worker.speculative.head_proposer import HeadProposer
from services.gpu_worker.speculative.native_eagle import Guess, NativeEagle, Wanted, load_eagle
from services.gpu_worker.training.eagle import EagleHead, Passes
from services.gpu_worker.training.trainer import Target
from tests.gpu_worker.any_engine import load_gpu
from tests.gpu_worker.head_models import load_tiny, load_tiny_gpu, published, read_rows, save_tiny
from tests.gpu_worker.test_cuda_graphs import Rerun
from tests.gpu_worker.tiny_models import Runner, prompts

KINDS = ["eagle", "eagle3"]
LOADS = pytest.mark.parametrize("load", [load_tiny, load_tiny_gpu], ids=["native", "gpu"])


def loaded(engine: NativeEngine | GpuEngine, kind: Any, folder: Path) -> NativeEagle | GpuEagle:
    if isinstance(engine, GpuEngine):
        proposer = Heads(folder, kind, folder.parent / "model", engine.info.block_size).load(engine)
        assert isinstance(proposer, HeadProposer) and isinstance(proposer._head, GpuEagle)
        return proposer._head
    config, weights = load_eagle(folder, kind, engine.config, engine.decoder.weights)
    info = engine.info
    return NativeEagle(config, weights, engine.decoder, num_blocks=info.num_blocks, block_size=info.block_size,
                       max_model_len=info.max_model_len)  # fmt: skip


def known(guesses: list[list[Guess]]) -> list[list[tuple[int, object]]]:
    """Where a GPU's kernels are stood in for, torch's products round by how many rows there are."""
    return [[(guess.token_id, pytest.approx(guess.logprob, abs=1e-4)) for guess in own] for own in guesses]


def as_known(guesses: list[list[Guess]]) -> list[list[tuple[int, float]]]:
    return [[(guess.token_id, guess.logprob) for guess in own] for own in guesses]


def ids_in(guesses: list[Guess]) -> list[int]:
    return [guess.token_id for guess in guesses]


@torch.no_grad()
def chain_logits(
    head: EagleHead, target: Target, token_ids: list[int], rows: torch.Tensor, drafts: list[int]
) -> torch.Tensor:
    """What the module foresees after the text, and after each of the drafts: [1 + drafts, draft vocabulary]. All rows
    at once, each with the row that the one before has left, one more time for each draft."""
    embeds = target.embedding[[*token_ids[1:], *drafts]][None]
    first = head.first_rows(rows[: len(token_ids) - 1].flatten(1)[None])
    given, found = first, []
    for place in range(len(drafts) + 1):
        left = head(embeds[:, : given.shape[1]], given, target.angles, Passes([], []))
        found.append(head.logits(left[:, -1])[0])
        given = torch.cat((given, left[:, -1:]), dim=1)
        assert given.shape[1] == len(token_ids) + place
    return torch.stack(found)


def wanted(
    engine: NativeEngine | GpuEngine, seq: Sequence, layers: tuple[int, ...], count: int, first: int = 0
) -> Wanted:
    return Wanted(seq, first, read_rows(engine, seq.token_ids, layers)[first:-1], count)


@LOADS
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_guesses_are_as_good_to_the_module_as_its_own(tmp_path: Path, kind: str, load: Any) -> None:
    """Weights and activations of 8 bits round, so a guess may be another where two are nearly as good."""
    engine = load(tmp_path / "model")
    head, target = published(kind, tmp_path / "model", tmp_path / "head")
    eagle = loaded(engine, kind, tmp_path / "head")
    runner = Runner(engine)
    behind = []
    for text in prompts(12, seed=5):
        seq = runner.sequence(text, 6)
        guesses = ids_in(eagle.guess([wanted(engine, seq, eagle.config.tap_layers, 4)])[0])
        assert len(guesses) == 4
        rows = read_rows(engine, text, eagle.config.tap_layers)
        logits = chain_logits(head, target, text, rows, guesses[:-1])
        places = torch.searchsorted(target.token_ids, torch.tensor(guesses))
        found = eagle.guess([wanted(engine, seq, eagle.config.tap_layers, 4)])[0]
        assert found[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[places[0]]), abs=0.2)
        behind.append((logits.amax(-1) - logits[range(4), places]) / logits.std(-1))
        runner.free(seq)
    assert torch.stack(behind).mean() < 0.03 and torch.stack(behind).max() < 0.5
    if load is load_tiny_gpu:
        assert torch.stack(behind).max() < 1e-4, "its floats stay floats"


@LOADS
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_do_not_depend_on_mates_or_on_how_rows_come(tmp_path: Path, kind: str, load: Any) -> None:
    engine = load(tmp_path / "model")
    published(kind, tmp_path / "model", tmp_path / "head")
    eagle = loaded(engine, kind, tmp_path / "head")
    runner, layers = Runner(engine), eagle.config.tap_layers
    settings = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.5, "seed": 4}]
    sequences = [runner.sequence(p, 8, i % 2, **settings[i % 3]) for i, p in enumerate(prompts(7, seed=2, low=9))]
    alone = [eagle.guess([wanted(engine, s, layers, 1 + i % 4)])[0] for i, s in enumerate(sequences)]
    assert [len(ids) for ids in alone] == [1 + i % 4 for i in range(7)]
    together = eagle.guess([wanted(engine, s, layers, 1 + i % 4) for i, s in enumerate(sequences)])
    assert as_known(together) == known(alone)
    for seq in sequences:  # the first rows a step earlier, the rest now
        cut = Sequence(seq.sid, 1, seq.choice, seq.params, 5, seq.token_ids[:5], seq.block_ids)
        eagle.guess([wanted(engine, cut, layers, 3)])
    again = [wanted(engine, s, layers, 1 + i % 4, first=4) for i, s in enumerate(sequences)]
    assert as_known(eagle.guess(again)) == known(alone)


@LOADS
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_has_the_noise_of_its_token_and_position(tmp_path: Path, kind: str, load: Any) -> None:
    engine = load(tmp_path / "model")
    head, target = published(kind, tmp_path / "model", tmp_path / "head")
    eagle = loaded(engine, kind, tmp_path / "head")
    runner = Runner(engine)
    num_equal = 0
    for number, text in enumerate(prompts(20, seed=6)):
        seq = runner.sequence(text, 4, choice=1, temperature=2.0, seed=number)
        guess = eagle.guess([wanted(engine, seq, eagle.config.tap_layers, 1)])[0][0].token_id
        rows = read_rows(engine, text, eagle.config.tap_layers)
        logits = chain_logits(head, target, text, rows, [])[0]
        noise = gumbel_noise_at([NoiseKey(seed=number, position=0, choice=1)], [target.token_ids])[0]
        num_equal += guess == int(target.token_ids[(logits / 2.0 + noise).argmax()])
        runner.free(seq)
    assert num_equal >= (20 if load is load_tiny_gpu else 16)


@LOADS
def test_a_head_may_begin_at_any_block(tmp_path: Path, load: Any) -> None:
    """Where it has not seen the first blocks of a text, it reads the rest as if that began there."""
    engine = load(tmp_path / "model")
    published("eagle3", tmp_path / "model", tmp_path / "head")
    eagle = loaded(engine, "eagle3", tmp_path / "head")
    runner, size = Runner(engine), engine.info.block_size
    seq = runner.sequence(prompts(1, seed=8, low=3 * size, high=3 * size + 1)[0], 5)
    taps = read_rows(engine, seq.token_ids, eagle.config.tap_layers)[size:-1]
    got = eagle.guess([Wanted(seq, size, taps, 4, base=size)])
    rest = Sequence("rest", 1, 0, seq.params, 3, seq.token_ids[size:], runner.sequence([0], 4 * size).block_ids)
    assert as_known(eagle.guess([Wanted(rest, 0, taps, 4)])) == known(got)


@pytest.mark.parametrize("kind", KINDS)
def test_later_places_are_graphs_that_guess_the_same(tmp_path: Path, kind: str) -> None:
    """With rows that fill them up, and while sequences leave that have all that they want."""
    save_tiny(tmp_path / "model")
    rerun = Rerun()
    engines = [load_gpu(tmp_path / "model", kv_cache_bytes=8 << 20, recorder=r) for r in (None, rerun)]
    published(kind, tmp_path / "model", tmp_path / "head")
    told = []
    for engine in engines:
        eagle, runner = loaded(engine, kind, tmp_path / "head"), Runner(engine)
        settings = [{}, {"temperature": 0.8, "seed": 3}]
        sequences = [runner.sequence(p, 8, **settings[i % 2]) for i, p in enumerate(prompts(7, seed=2, low=9))]
        asked = [wanted(engine, s, eagle.config.tap_layers, 1 + i % 4) for i, s in enumerate(sequences)]
        told.append([eagle.guess(asked) for _ in range(RECORDED_AFTER + 2)])
    assert rerun.num_recorded == 3 and rerun.num_replays >= 6
    assert [as_known(own) for own in told[1]] == [known(own) for own in told[0]]


def test_what_recording_takes_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a head whose first guesses have many places would seem slow, and rest."""
    now_s = [0.0]

    class Slow(Rerun):
        def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            now_s[0] += 9.0
            return super().record(run)

    monkeypatch.setattr(gpu_eagle, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    save_tiny(tmp_path / "model")
    engine = load_gpu(tmp_path / "model", kv_cache_bytes=8 << 20, recorder=Slow())
    published("eagle3", tmp_path / "model", tmp_path / "head")
    eagle, sequence = loaded(engine, "eagle3", tmp_path / "head"), Runner(engine).sequence(prompts(1, low=9)[0], 8)
    told = []
    for _ in range(2):
        eagle.guess([wanted(engine, sequence, eagle.config.tap_layers, 1 + RECORDED_AFTER)])
        told.append((eagle.later_s, eagle.aside_s))
    assert told == [(0.0, 9.0), (0.0, 0.0)]
