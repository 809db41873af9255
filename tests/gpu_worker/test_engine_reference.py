"""The engine against transformers: greedy text and log-probabilities of tiny random models, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.gpu_worker.engine import TorchEngine
from tests.gpu_worker.gguf_files import write_gguf
from tests.gpu_worker.tiny_models import ARCHITECTURES, Runner, ids_of, prompts, save
from tests.kernels.threads import torch_threads

NUM_OUTPUT = 64


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_and_logits(tmp_path: Path, name: str) -> None:
    with torch_threads(1):
        model = save(name, tmp_path)
        runner = Runner(TorchEngine.load(tmp_path, kv_cache_bytes=8 << 20))
        texts = prompts(5)
        sequences = [runner.sequence(prompt, NUM_OUTPUT, logprobs=3) for prompt in texts]
        results = runner.run(sequences, prefill_chunk=13)
        for prompt, sequence, tokens in zip(texts, sequences, results, strict=True):
            answer = sequence.token_ids[len(prompt) :]
            assert len(set(answer)) > 10  # a text that says something about the numbers
            with torch.no_grad():
                logits = model(torch.tensor([sequence.token_ids])).logits[0, len(prompt) - 1 : -1].double()
            assert logits.argmax(-1).tolist() == answer  # so it is the greedy one
            logprobs = logits.log_softmax(-1)
            for i, token in enumerate(tokens):
                assert token.logprob == pytest.approx(float(logprobs[i, token.token_id]), abs=1e-4)
                assert [p for _, p in token.top] == pytest.approx(logprobs[i].topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "arch"), [("llama", "llama"), ("llama-tied", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_a_gguf_file_computes_the_same(tmp_path: Path, name: str, arch: str) -> None:
    with torch_threads(1):
        model = save(name, tmp_path / "hf")
        write_gguf(model, tmp_path / "model.gguf", arch)
        texts = []
        for path in (tmp_path / "hf", tmp_path / "model.gguf"):
            runner = Runner(TorchEngine.load(path, kv_cache_bytes=8 << 20))
            texts.append(ids_of(runner.run([runner.sequence(p, 20) for p in prompts(3)])))
        assert texts[0] == texts[1]


def test_llama3_frequencies_in_a_gguf_file(tmp_path: Path) -> None:
    """There the scaling is a tensor of divisors."""
    with torch_threads(1):
        model = save("llama-rope3", tmp_path / "hf")
        scaled = model.model.rotary_emb.inv_freq
        plain = 1.0 / model.config.rope_parameters["rope_theta"] ** (torch.arange(0, 8, 2).float() / 8)
        factors = plain / scaled
        assert factors.max() > 7 and factors.min() == 1
        write_gguf(model, tmp_path / "model.gguf", changes={"rope_freqs.weight": factors})
        texts = []
        for path in (tmp_path / "hf", tmp_path / "model.gguf"):
            runner = Runner(TorchEngine.load(path, kv_cache_bytes=8 << 20))
            texts.append(ids_of(runner.run([runner.sequence(p, 20) for p in prompts(3)])))
        assert texts[0] == texts[1]
