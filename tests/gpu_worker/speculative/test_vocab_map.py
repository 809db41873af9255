from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from services.gpu_worker.batch import Chunk, Drawn, EngineInfo
from services.gpu_worker.model.config import ConfigError
from services.gpu_worker.speculative.vocab_map import MappedEngine, VocabMap, map_vocabularies
from shared.vocabulary import Vocabulary
from tests.gpu_worker.builders import make_sequence


def vocabulary(*texts: str, special: Seq[int] = ()) -> Vocabulary:
    return Vocabulary([text.encode() for text in texts], frozenset(special))


def test_the_same_vocabulary_needs_no_map() -> None:
    words = vocabulary("a", "b", "c")
    assert map_vocabularies(words, words, 3, 3) is None
    assert map_vocabularies(words, words, 4, 4) is None  # a model may have more rows than tokens


def test_tokens_are_found_by_their_text_and_kind() -> None:
    target = vocabulary("b", "</s>", "new", "a", "", special=[1])
    draft = vocabulary("a", "b", "</s>", "</s>", "", special=[3])
    assert map_vocabularies(target, draft, 6, 5) == VocabMap([1, 3, 0, 0, 0, 0], ((0, 1), (1, 3), (3, 0)))


def test_rows_of_a_model_that_are_no_tokens_are_mapped_to_nothing() -> None:
    words = vocabulary("a", "b", "c")
    assert map_vocabularies(words, words, 3, 8) == VocabMap([0, 1, 2], ((0, 0), (1, 1), (2, 2)))


def test_too_little_in_common_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_config: model: 1 of its 3 tokens are in the served model's"):
        map_vocabularies(vocabulary("a", "x", "y"), vocabulary("a", "b", "c"), 3, 3)


class Logits:
    """A model that sees every token and is surest of those with the highest id."""

    info = EngineInfo("v", 4, 64, 4, 8, "cpu")

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def step(self, chunks: Seq[Chunk]) -> list[Drawn]:
        raise NotImplementedError

    def sample_logits(self, chunks: Seq[Chunk]) -> tuple[Seq[int], torch.Tensor]:
        self.seen += [c.seq.token_ids for c in chunks]
        numbers = [n for n, c in enumerate(chunks) if c.sample]
        return numbers, torch.arange(4.0).repeat(len(numbers), 1)


def draw(engine: MappedEngine, **params: Any) -> list[Drawn]:
    first, second = (make_sequence(num_prompt_tokens=2, **params) for _ in range(2))
    first.token_ids, second.token_ids = [0, 5], [4, 2]
    return engine.step([Chunk(first, 0, 1, False), Chunk(second, 0, 2, True)])


def test_ids_are_the_targets_before_and_behind() -> None:
    """Of the draft model's surest tokens one is the target's 2, and the others are none of its tokens."""
    model = Logits()
    engine = MappedEngine(model, VocabMap([1, 0, 3, 0, 2, 0], ((0, 1), (2, 3), (4, 2))))
    drawn = draw(engine, logprobs=0)
    assert engine.info.vocab_size == 6 and model.seen == [[1, 0], [2, 3]]
    assert drawn[0] == () and drawn[1][0].token_id == 2
    assert drawn[1][0].logprob == pytest.approx(torch.tensor([1.0, 2.0, 3.0]).log_softmax(0)[2].item(), abs=1e-4)


def test_controls_speak_of_the_targets_tokens() -> None:
    engine = MappedEngine(Logits(), VocabMap([1, 0, 3, 0, 2, 0], ((0, 1), (2, 3), (4, 2))))
    assert draw(engine, logit_bias={2: -50.0})[1][0].token_id == 4
    assert draw(engine, stop_token_ids=(2, 4, 5), min_tokens=3)[1][0].token_id == 0
