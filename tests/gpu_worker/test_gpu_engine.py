"""The GPU engine on a CPU, with the specifications of its kernels: its tokens are those of torch's engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.planar_weight import GroupedCodes, PlanarWeight
from services.gpu_worker.batch import Chunk
from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.gpu_engine import GpuEngine, StepLimits, largest_step
from services.gpu_worker.gpu_memory import LEAST_SPARE
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.speculative.draft import chain
from services.gpu_worker.step_inputs import SequenceError
from services.gpu_worker.weights.on_device import DeviceLinear, OnDevice
from tests.gpu_worker.engine_loops import run_loop
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import Runner, build, ids_of, prompts, save

CPU = torch.device("cpu")
ROOM = {"kv_cache_bytes": 4 << 20}
FAMILIES = ["llama", "llama-biases", "qwen3", "olmo2", "gemma2", "gemma3", "smollm3", "phi3-window", "granite-tied",
            "stablelm-bias", "starcoder2-window", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek2",
            "deepseek2-groups", "deepseek3", "deepseek3-yarn"]  # fmt: skip
CONTROLS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3},
    {"temperature": 0.5, "seed": 1 << 40, "logprobs": 2},
]  # fmt: skip
SICK = 298


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save("llama", path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> GpuEngine:
    return GpuEngine.load(folder, CPU, **ROOM)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_torchs_engine(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    texts = prompts(len(CONTROLS), seed=3)
    runs = []
    for made in (TorchEngine.load(tmp_path, **ROOM), GpuEngine.load(tmp_path, CPU, **ROOM)):
        runner = Runner(made)
        sequences = [runner.sequence(text, 5, **own) for text, own in zip(texts, CONTROLS, strict=True)]
        runs.append(ids_of(runner.run(sequences, prefill_chunk=13)))
    assert runs[0] == runs[1]


def test_chunks_neighbours_and_hits_change_no_token(engine: GpuEngine) -> None:
    runner = Runner(engine)
    text = prompts(1, low=39)[0]
    alone = runner.sequence(text, 6, temperature=1.0)
    want = ids_of(runner.run([alone]))[0]
    others = [runner.sequence(p, 6) for p in prompts(3, seed=1)]
    again = runner.sequence(text, 6, temperature=1.0)
    assert ids_of(runner.run([*others, again], prefill_chunk=7))[-1] == want
    hit = runner.sequence(text, 6, temperature=1.0)
    hit.block_ids[:2] = alone.block_ids[:2]
    hit.num_computed = 32
    assert ids_of(runner.run([hit]))[0] == want


def test_steps_that_overlap_draw_the_same(engine: GpuEngine) -> None:
    texts = prompts(5, seed=5)
    runner = Runner(engine)
    want = [
        ids_of(runner.run([runner.sequence(text, 12, **own)]))[0] for text, own in zip(texts, CONTROLS, strict=True)
    ]
    assert run_loop(engine, texts, CONTROLS, 12) == want
    assert run_loop(engine, texts, CONTROLS, 12, overlap=False) == want


def test_log_probabilities_are_the_samplers(engine: GpuEngine, folder: Path) -> None:
    text = prompts(1)[0]
    got, want = (
        runner.run([runner.sequence(text, 3, logprobs=3)])[0]
        for runner in (Runner(engine), Runner(TorchEngine.load(folder, **ROOM)))
    )
    for mine, theirs in zip(got, want, strict=True):
        assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
        assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-5)


def test_what_is_not_finite_ends_alone(tmp_path: Path) -> None:
    model = build("llama")
    model.model.embed_tokens.weight.data[SICK] = torch.nan
    model.save_pretrained(tmp_path)
    engine = GpuEngine.load(tmp_path, CPU, **ROOM)
    runner = Runner(engine)
    texts = prompts(3, seed=9, vocab_size=SICK)
    want = [ids_of(runner.run([runner.sequence(text, 8)]))[0] for text in texts]
    for own in ({}, {"logprobs": 1}):
        assert run_loop(engine, [*texts, [3, SICK, 9]], [{}, {}, {}, own], 8) == [*want, []]


def test_bad_sequences_fail_before_anything_is_computed(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(engine)
    good, bad = runner.sequence([1, 2, 3], 4), runner.sequence([1, 2, 3], 4)
    bad.token_ids[1] = 300
    monkeypatch.setattr(engine.decoder, "forward", None)
    with pytest.raises(SequenceError, match="vocabulary") as caught:
        engine.step([Chunk(good, 0, 3, True), Chunk(bad, 0, 3, True)])
    assert caught.value.sid == bad.sid
    assert engine.step([]) == []


def test_parameters_are_checked_again(engine: GpuEngine) -> None:
    bad = Runner(engine).sequence([1, 2], 4, logit_bias={300: 1.0})
    with pytest.raises(ValueError, match="logit_bias"):
        engine.step([Chunk(bad, 0, 2, True)])


def test_logits_of_every_row(engine: GpuEngine) -> None:
    text = prompts(1, low=20)[0]
    runner = Runner(engine)
    rows = engine.logits(Chunk(runner.sequence(text, 1), 0, len(text), True), 4)
    assert rows.shape == (len(text) - 4, 300)
    assert int(rows[-1].argmax()) == ids_of(runner.run([runner.sequence(text, 1)]))[0][0]


def test_info_and_variant(folder: Path, engine: GpuEngine) -> None:
    info = engine.info
    assert (info.vocab_size, info.max_model_len, info.block_size, info.device) == (300, 512, 16, "interpreted")
    assert info.num_blocks == (4 << 20) // (2 * 3 * 2 * 16 * 16 * 4)
    assert info.variant.startswith("gpu-interpreted-")
    half = GpuEngine.load(folder, CPU, dtype="float16", **ROOM).info
    assert half.num_blocks == 2 * info.num_blocks and half.variant != info.variant
    eighth = GpuEngine.load(folder, CPU, kv_cache_dtype="int8", **ROOM).info
    assert eighth.num_blocks > 3 * info.num_blocks and eighth.variant not in (info.variant, half.variant)


@pytest.mark.parametrize("family", ["llama-biases", "mixtral", "deepseek3"])
def test_libraries_multiply_many_rows_if_they_may(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(family, tmp_path)
    num_rows: list[int] = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: num_rows.append(len(x)) or linear(x, *rest))
    slow, fast = (GpuEngine.load(tmp_path, CPU, fast=f, **ROOM) for f in (False, True))
    text = [i % 250 for i in range(80)]
    want, got = (made.logits(Chunk(Runner(made).sequence(text, 1), 0, 80, True), 0) for made in (slow, fast))
    assert set(num_rows) == {80} and slow.info.variant != fast.info.variant
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    runs = [ids_of(Runner(made).run([Runner(made).sequence(text[:9], 4)])) for made in (slow, fast)]
    assert runs[0] == runs[1] and set(num_rows) == {80}  # few rows are multiplied as they are without


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "int8", "fp8_e4m3"])
def test_smaller_caches_hold_what_torchs_engine_has_there(folder: Path, kv_cache_dtype: str) -> None:
    texts = prompts(2, seed=4)
    runs = []
    for made in (TorchEngine.load(folder, kv_cache_dtype=kv_cache_dtype, **ROOM),
                 GpuEngine.load(folder, CPU, kv_cache_dtype=kv_cache_dtype, **ROOM)):  # fmt: skip
        runner = Runner(made)
        runs.append(ids_of(runner.run([runner.sequence(text, 5) for text in texts], prefill_chunk=13)))
    assert runs[0] == runs[1]


class MadeUpCard:
    """Counts what steps a profile runs; everything else is told."""

    def __init__(self, total: int, free: int, taken: int, step: int) -> None:
        self.total_bytes = total
        self._free = [free, free - taken]
        self._step = step

    def free_bytes(self) -> int:
        return self._free.pop(0)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return self._step


def test_the_pool_is_what_weights_and_steps_leave_of_the_card(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def blocks(card: MadeUpCard, share: float = 4 / 1024) -> int:
        limits = StepLimits(max_num_batched_tokens=600, max_num_seqs=3, memory_share=share)
        return GpuEngine.load(folder, CPU, card=card, limits=limits).info.num_blocks

    block = 2 * 3 * 2 * 16 * 16 * 4
    total = 1 << 30
    assert blocks(MadeUpCard(total, free=total, taken=1 << 20, step=1 << 20)) == (2 << 20) // block
    assert not caplog.messages
    assert blocks(MadeUpCard(total, free=LEAST_SPARE + (3 << 20), taken=1 << 20, step=1 << 20)) == (1 << 20) // block
    assert "others have left 0.5 GiB, of which 0.5 GiB stay free: the KV pool is smaller" in caplog.messages[0]
    with pytest.raises(ConfigError, match="leaves no room for keys and values"):
        blocks(MadeUpCard(total, free=total, taken=3 << 20, step=1 << 20))
    with pytest.raises(ConfigError, match="the weights alone take"):
        blocks(MadeUpCard(total, free=total, taken=0, step=0), share=1e-5)


def test_the_largest_step_has_all_tokens_and_samples(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Seq[Chunk]] = []
    monkeypatch.setattr(engine, "step", steps.append)
    for tokens, seqs in ((600, 3), (4, 64), (2000, 2)):
        largest_step(engine, StepLimits(tokens, seqs, 0.9))
    assert [[c.count for c in chunks] for chunks in steps] == [[512, 87, 1], [1] * 4, [512, 512]]
    assert {c.start + c.count for chunks in steps for c in chunks} == {512}, "as many keys as there may be"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype: 'int8'"),
        ({"max_model_len": 513}, "max_model_len: 513"),
    ],
)
def test_settings_are_refused_by_name(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GpuEngine.load(folder, CPU, **(ROOM | settings))


@pytest.mark.parametrize("own", CONTROLS)
def test_drafts_change_how_many_tokens_a_step_draws_never_which(engine: GpuEngine, own: dict[str, Any]) -> None:
    runner = Runner(engine)
    text = prompts(1, seed=8)[0]
    want = ids_of(runner.run([runner.sequence(text, 6, **own)]))[0]
    sequence, other = (runner.sequence(text, 6, **own) for _ in range(2))
    runner.step([Chunk(sequence, 0, len(text), True)])
    wrong = (want[3] + 1) % 300
    chunks = [Chunk(other, 0, 2, False), Chunk(sequence, len(text), 1, True, chain([want[1], want[2], wrong, want[4]]))]
    none, drawn = engine.step(chunks)
    assert (none, [t.token_id for t in drawn]) == ((), want[1:4])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_give_the_logits_of_the_same_weights_as_floats(quantization: str, tmp_path: Path) -> None:
    """Within what scales of float16 cost."""
    save("llama", tmp_path, hidden_size=128, intermediate_size=256, num_attention_heads=4)
    text = prompts(1, low=20)[0]

    def logits(made: TorchEngine | GpuEngine) -> torch.Tensor:
        return made.logits(Chunk(Runner(made).sequence(text, 1), 0, len(text), True), 0)

    want = logits(TorchEngine.load(tmp_path, quantization=quantization, **ROOM))
    engine = GpuEngine.load(tmp_path, CPU, quantization=quantization, **ROOM)
    out = engine.decoder.weights.layers[0].out
    assert isinstance(out, DeviceLinear) and isinstance(out.parts[0], PlanarWeight)
    got = logits(engine)
    assert (got - want).abs().max() < 0.01 * want.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_output_head_stay_in_the_files_codes(tied: bool, tmp_path: Path) -> None:
    model = build("llama", hidden_size=128, intermediate_size=256, num_attention_heads=4, tie_word_embeddings=tied)
    path = tmp_path / "model.gguf"
    write_gguf(model, path, type_name="Q8_0")
    text = prompts(1, low=20)[0]
    engine = GpuEngine.load(path, CPU, **ROOM)
    weights: Any = engine.decoder.weights
    embedding, (head,) = weights.embedding.weight, weights.head.parts
    assert isinstance(embedding, PlanarWeight) and isinstance(head, PlanarWeight) and (head is embedding) == tied
    want, got = (
        made.logits(Chunk(Runner(made).sequence(text, 1), 0, len(text), True), 0)
        for made in (TorchEngine.load(path, **ROOM), engine)
    )
    assert (got - want).abs().max() < 0.01 * want.abs().max()


def test_parts_of_several_formats_are_multiplied_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = GroupedCodes(4, torch.randint(0, 16, (8, 128), generator=generator).byte(), torch.ones(8, 1), centre=8)
    floats, bias, x = (torch.randn(shape, generator=generator) for shape in ((4, 128), (12,), (3, 128)))

    class Stored:
        def floats(self) -> torch.Tensor:
            raise AssertionError("codes are kept")

        def stored(self) -> list[Any]:
            return [floats, codes]

    linear = OnDevice(CPU, torch.float32).projection(Stored(), bias)
    assert len(linear.parts) == 2
    torch.testing.assert_close(linear(x), x @ torch.cat((floats, codes.values())).t() + bias, rtol=1e-3, atol=1e-3)


def test_a_step_stands_if_what_its_layers_have_read_cannot_be_kept(tmp_path: Path) -> None:
    """There may be no memory for it: a guess less, not an answer."""
    save("llama", tmp_path)
    engine = GpuEngine.load(tmp_path, CPU, **ROOM)
    runner, text = Runner(engine), prompts(1)[0]
    want = ids_of(runner.run([runner.sequence(text, 4)]))

    def take(chunks: Seq[Chunk], rows: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no more")

    engine.tap((1,), take)
    assert ids_of(runner.run([runner.sequence(text, 4)])) == want
