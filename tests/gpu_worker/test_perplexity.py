"""Perplexity: its windows, its sums, and the command from a text to a figure."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.gpu_worker.commands import eval_perplexity
from services.gpu_worker.commands.perplexity import ROWS_TOGETHER, Perplexity, losses, windows
from tests.gpu_worker.any_engine import load_native, load_torch
from tests.gpu_worker.tiny_models import VOCAB_SIZE, build, prompts, save
from tests.kernels.threads import torch_threads

pytestmark = pytest.mark.timeout(300)  # whoever first imports all of torch and transformers pays for it

BOS = 257


def test_windows_are_whole_and_begin_with_bos_where_the_model_has_it() -> None:
    ids = list(range(10, 35))
    assert windows(ids, 10, None) == [list(range(10, 20)), list(range(20, 30))]
    assert windows(ids, 10, BOS) == [[BOS, *range(11, 20)], [BOS, *range(21, 30)]]
    assert windows(ids, 25, None) == [ids] and windows(ids, 26, None) == []


def test_the_error_is_that_of_a_mean() -> None:
    found, values = Perplexity(), torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    found.add(values[:1])
    found.add(values[1:])
    assert found.value == pytest.approx(math.exp(3.0))
    assert found.error == pytest.approx(found.value * float(values.std(correction=0)) / math.sqrt(3))


def test_one_token_has_no_error() -> None:
    found = Perplexity()
    found.add(torch.tensor([2.0], dtype=torch.float64))
    assert (found.value, found.error) == (pytest.approx(math.exp(2.0)), 0.0)


@pytest.mark.parametrize("size", [9, 64, 2 * ROWS_TOGETHER + 83, 4 * ROWS_TOGETHER])
@pytest.mark.parametrize("load", [load_torch, load_native])
def test_losses_are_those_of_the_second_half(tmp_path: Path, load: object, size: int) -> None:
    assert callable(load)
    model = save("llama", tmp_path)
    [window] = prompts(1, low=size, high=size + 1)
    with torch_threads(1), torch.inference_mode():
        want = torch.nn.functional.cross_entropy(
            model(torch.tensor([window])).logits[0, size // 2 : -1], torch.tensor(window[size // 2 + 1 :]),
            reduction="none",
        )  # fmt: skip
        got = losses(load(tmp_path, kv_cache_bytes=8 << 20), window)
    assert len(got) == size - size // 2 - 1
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0)


def write_tokenizer(folder: Path) -> None:
    """A token a byte."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def run(tiny: Path, text: Path, *options: str) -> int:
    with torch_threads(1):
        return eval_perplexity.main([str(text), "--model", str(tiny), "--engine", "torch", "--threads", "1", *options])


def test_the_command_reads_a_text(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 2)
    assert run(tiny, text, "--ctx", "60", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["windows"], result["ctx"], result["tokens"]) == (3, 60, 3 * 29)
    # a random model's logits are wide, so it is worse than one that knows nothing
    assert result["perplexity"] > VOCAB_SIZE and result["error"] > 0
    assert run(tiny, text, "--ctx", "60", "--chunks", "1") == 0
    assert "over 29 tokens (1 windows of 60)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, options, sentence",
    [
        (b"short", ["--ctx", "60"], "has 5 tokens, fewer than one window of 60"),
        (b"long " * 200, ["--ctx", "600"], "--ctx 600 is more than the 512 tokens"),
        (b"\xff" * 100, [], "the text is not UTF-8"),
        (None, [], "No such file"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes | None, options: list[str],
    sentence: str,
) -> None:  # fmt: skip
    if text is not None:
        (tmp_path / "text").write_bytes(text)
    assert run(tiny, tmp_path / "text", *options) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("headrace eval perplexity: ") and sentence in said


@pytest.mark.parametrize("options", [["--ctx", "7"], ["--chunks", "-1"]])
def test_impossible_options_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        eval_perplexity.parse(["text", *options])
