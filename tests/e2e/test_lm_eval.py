"""lm-evaluation-harness gives a model the same score through this server as through transformers: a small task of our
own, on a tiny model with random weights, so that nothing is downloaded."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders

from shared.vocabulary import BYTE_OF_CHAR
from tests.e2e.stack import Stack
from tests.gpu_worker.tiny_models import save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = Path(__file__).parents[1] / "bench" / "data" / "wonderland.txt"
NUM_QUESTIONS = 24
NUM_CHOICES = 4
CONTEXT_CHARS, ENDING_CHARS = 48, 12
MAX_DIFFERENCE = 1e-3  # of a log-likelihood: both compute in float32
TASK = """task: endings
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: label
doc_to_choice: endings
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def write_model(folder: Path) -> None:
    """Bytes are its tokens, beside one that begins and one that ends."""
    save("llama", folder, vocab_size=300, bos_token_id=256, eos_token_id=257)
    backend = Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = token_decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_task(folder: Path) -> None:
    """Which of some endings goes on with a line of the book."""
    text, chance = " ".join(TEXT.read_text().split()), random.Random(1)
    rows = []
    for _ in range(NUM_QUESTIONS):
        at = [chance.randrange(len(text) - 100) for _ in range(NUM_CHOICES)]
        ends = [text[i + CONTEXT_CHARS : i + CONTEXT_CHARS + ENDING_CHARS] for i in at]
        label = chance.randrange(NUM_CHOICES)
        rows.append({"context": text[at[label] : at[label] + CONTEXT_CHARS], "endings": ends, "label": label})
    data = folder / "endings.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "endings.yaml").write_text(TASK.format(data=data))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed; it is in the extra `clients`")
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model: Path, stacks_redis: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    env = {"engine": "torch", "kv_cache_dtype": "float32", "kv_cache_bytes": 16 << 20, "max_model_len": 512}
    async with Stack(stacks_redis, tmp_path_factory.mktemp("lm-eval"), model=str(model), env=env) as stack:
        yield stack


def evaluated(folder: Path, name: str, arguments: str) -> tuple[dict[str, float], list[Any]]:
    """Scores, and what each choice of each question was given."""
    out = folder / name
    command = [
        sys.executable, "-m", "lm_eval", "--model", name, "--model_args", arguments, "--tasks", "endings",
        "--include_path", str(folder), "--output_path", str(out), "--log_samples", "--batch_size", "1",
        "--device", "cpu",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "unused", "HF_HOME": str(folder)}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    [results], [samples] = list(out.rglob("results_*.json")), list(out.rglob("samples_endings_*.jsonl"))
    scores = json.loads(results.read_text())["results"]["endings"]
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: int(row["doc_id"]))
    return {k: scores[k] for k in ("acc,none", "acc_norm,none")}, [row["filtered_resps"] for row in rows]


def test_the_score_is_that_of_transformers(model: Path, stack: Stack, tmp_path: Path) -> None:
    write_task(tmp_path)
    own = f"model={stack.served_name},base_url={stack.url}/v1/completions,tokenizer_backend=huggingface"
    served = evaluated(tmp_path, "local-completions", f"{own},tokenizer={model},num_concurrent=4,max_retries=1")
    expected = evaluated(tmp_path, "hf", f"pretrained={model},dtype=float32")
    assert served[0] == expected[0]
    for question, same in zip(served[1], expected[1], strict=True):
        for (likelihood, is_greedy), (other, other_greedy) in zip(question, same, strict=True):
            assert abs(float(likelihood) - float(other)) < MAX_DIFFERENCE and is_greedy == other_greedy
    assert len({tuple(map(str, question)) for question in served[1]}) == NUM_QUESTIONS
