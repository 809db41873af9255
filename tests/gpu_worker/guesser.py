"""A drafter that knows what the scripted engine draws, and is wrong now and then."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.gpu_worker.batch import Chunk, Drawn, Sequence
from services.gpu_worker.speculative.draft import ROOT, Draft
from shared import scripted_vocab as vocab


class Guesser:
    """Of its drafts, the one at output position n is wrong where n is a multiple of `wrong_every`, and those behind it
    are what would have come else. num_drafts: of each chunk, as far as there is room. beside: of its guesses, so many
    wrong ones stand beside each, and before it."""

    def __init__(self, num_drafts: int = 3, wrong_every: int = 5, beside: int = 0) -> None:
        self.num_drafts = num_drafts
        self.beside = beside
        self.wrong_every = wrong_every
        self.num_drafted = 0
        self.num_failed = 0
        self.seconds: list[float] = []
        self.forgotten: list[str] = []

    def rests(self, num_sequences: int) -> bool:
        return False

    def plan(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[int]:
        return [0] * len(chunks)

    def think(self) -> None:
        return

    def draft(self, chunks: Seq[Chunk], most: Seq[int], num_free: int) -> list[Draft]:
        drafts = []
        for chunk, allowed in zip(chunks, most, strict=True):
            count = min(self.num_drafts, allowed, num_free)
            num_free -= count
            drafts.append(self._guess(chunk.seq, count))
            self.num_drafted += count
        return drafts

    def expects(self, sequences: Seq[Sequence], most: Seq[int], num_free: int) -> bool:
        return any(most) and min(num_free, self.num_drafts) > 0

    def observe(self, chunks: Seq[Chunk], drawn: Seq[Drawn], seconds: float) -> None:
        self.seconds.append(seconds)

    def failed(self) -> None:
        self.num_failed += 1

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq.sid)

    def _guess(self, seq: Sequence, count: int) -> Draft:
        seed, choice = (seq.params.seed, seq.choice) if seq.params.temperature > 0 else (0, 0)
        ids, num_prompt = list(seq.token_ids), seq.num_prompt_tokens
        guessed: list[int] = []
        parents: list[int] = []
        parent = ROOT
        while len(guessed) < count:
            right = vocab.next_token(ids, num_prompt, seed, choice)
            is_wrong = (len(ids) - num_prompt) % self.wrong_every == 0
            wrong = [(right + 2 + i) % vocab.VOCAB_SIZE for i in range(self.beside)]
            guessed += [*wrong, (right + is_wrong) % vocab.VOCAB_SIZE]
            parents += [parent] * (1 + len(wrong))
            parent = len(guessed) - 1
            ids.append(right)
        return Draft(tuple(guessed), tuple(parents)).first(count)
