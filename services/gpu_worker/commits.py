"""What is drawn and not yet in the durable log, and what a commit's answers mean. *Pure.*

Each sequence has an account from its admission until Redis has its last token and its outcome. `num_committed` of the
sequence is the length of the log as far as the answers have told. A commit whose reply is lost is simply built again,
perhaps with more in it: the script answers *have*, or *from* with the length that it found, and the next one goes on
there. So nothing changes here before an answer has come. Sequences with nothing to say go along with no tokens, so
that they learn of a cancel or of another epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.gpu_worker.batch import SampledToken, Sequence
from shared.protocol import Outcome, TokenChunk
from shared.scripts import CommitCode, CommitEntry
from shared.wire import encode

MAX_COMMIT_BYTES = 256 * 1024
MAX_ENTRIES = 1024  # the script unpacks up to 4 values of each on Lua's stack, which holds 8000
MAX_CHUNK_TOKENS = 1024
MAX_CHUNK_TOKENS_WITH_LOGPROBS = 128  # each may bring 20 alternatives
ENDINGS = ("stop", "length")  # that a chunk can carry; what an error is stands in its outcome alone
ENTRY_BYTES = 64  # ids, counts and their framing

Place = tuple[str, int]  # (sid, epoch)
TokenLogprob = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(slots=True)
class Account:
    """logprobs: one a token of the whole output, where the request asked for them. scores: what it asked about the
    prompt's tokens, from the second on, as far as that is known. closed: no more tokens come."""

    seq: Sequence
    logprobs: list[TokenLogprob] | None
    scores: list[SampledToken]
    closed: bool = False
    outcome: Outcome | None = None
    shown: bool = False  # the first chunk of this place has been answered

    @property
    def position(self) -> int:
        """At which the log will end, once it has all that is known."""
        return self.seq.num_output_tokens - self.seq.num_to_score + len(self.scores)

    @property
    def num_pending(self) -> int:
        return self.position - self.seq.num_committed

    @property
    def has_news(self) -> bool:
        return self.closed or self.num_pending > 0

    @property
    def urgent(self) -> bool:
        return self.closed or (not self.shown and self.num_pending > 0)


@dataclass(frozen=True, slots=True)
class Commit:
    """closing: places whose last token and outcome are in it. complete: nobody with something to say was left out."""

    entries: tuple[CommitEntry, ...]
    closing: frozenset[Place]
    complete: bool


class Ledger:
    """All accounts. Not thread-safe; the running set's lock guards it."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def has(self, sid: str, epoch: int) -> bool:
        """Is there an account of this place or a later one?"""
        account = self._accounts.get(sid)
        return account is not None and account.seq.epoch >= epoch

    @property
    def urgent(self) -> bool:
        return any(a.urgent for a in self._accounts.values())

    @property
    def pending(self) -> bool:
        return any(a.has_news for a in self._accounts.values())

    def places(self) -> list[Place]:
        return [(a.seq.sid, a.seq.epoch) for a in self._accounts.values()]

    def unsettled(self) -> set[Place]:
        """Places that are closed here and not yet in the log."""
        return {(a.seq.sid, a.seq.epoch) for a in self._accounts.values() if a.closed}

    # --- what the running set says ---------------------------------------------------------------------------------

    def open(self, seq: Sequence, logprobs: Iterable[TokenLogprob] | None, scores: Iterable[SampledToken] = ()) -> None:
        """seq.num_committed is where the log ends; logprobs are those of the tokens in it, or None; so are scores."""
        self._accounts[seq.sid] = Account(seq, None if logprobs is None else list(logprobs), list(scores))

    def scored(self, seq: Sequence, tokens: Iterable[SampledToken]) -> None:
        """The next ones of the prompt."""
        self._accounts[seq.sid].scores += tokens

    def is_scoring(self, seq: Sequence) -> bool:
        """Are some of the prompt's yet to come?"""
        return self._accounts[seq.sid].position < 0

    def drew(self, seq: Sequence, token: SampledToken) -> None:
        """The token has been appended to the sequence."""
        logprobs = self._accounts[seq.sid].logprobs
        if logprobs is not None:
            logprobs.append((token.logprob, token.top))

    def close(self, seq: Sequence, outcome: Outcome | None) -> None:
        """No more tokens come. Without an outcome the sequence goes on elsewhere."""
        account = self._accounts[seq.sid]
        account.closed, account.outcome = True, outcome

    def drop(self, sid: str, epoch: int) -> None:
        account = self._accounts.get(sid)
        if account is not None and account.seq.epoch == epoch:
            del self._accounts[sid]

    def clear(self) -> None:
        self._accounts.clear()

    # --- commits -----------------------------------------------------------------------------------------------------

    def build(self, urgent_only: bool = False) -> Commit:
        """The next commit; changes nothing. urgent_only: first tokens and ends alone."""
        entries: list[CommitEntry] = []
        closing: set[Place] = set()
        num_bytes = 0
        accounts = [a for a in self._accounts.values() if a.urgent or not urgent_only]
        for account in sorted(accounts, key=lambda a: not a.has_news):
            entry = _entry(account)
            num_bytes += ENTRY_BYTES + len(entry.sid) + len(entry.chunk) + len(entry.outcome)
            if entries and (num_bytes > MAX_COMMIT_BYTES or len(entries) == MAX_ENTRIES):
                return Commit(tuple(entries), frozenset(closing), not account.has_news)
            entries.append(entry)
            if account.closed and entry.first + entry.count == account.position:
                closing.add((entry.sid, entry.epoch))
        return Commit(tuple(entries), frozenset(closing), True)

    def apply(self, commit: Commit, answers: Seq[tuple[CommitCode, int]]) -> list[tuple[Place, str]]:
        """Takes in the answers; the places that are not this worker's any more, with `stale` or `done`."""
        dropped: list[tuple[Place, str]] = []
        for entry, (code, length) in zip(commit.entries, answers, strict=True):
            account = self._accounts.get(entry.sid)
            if account is None or account.seq.epoch != entry.epoch:
                continue
            place = (entry.sid, entry.epoch)
            if code in (CommitCode.STALE, CommitCode.DONE):
                del self._accounts[entry.sid]
                dropped.append((place, code.name.lower()))
                continue
            position = account.position
            account.seq.num_committed = min(length, position)
            account.shown = account.shown or entry.count > 0
            if place in commit.closing and length == entry.first + entry.count:
                del self._accounts[entry.sid]
            elif account.closed and length > position:  # can be closed by nobody but its next place
                del self._accounts[entry.sid]
                dropped.append((place, "stale"))
            elif not commit.complete:  # those that were left out come first next time
                self._accounts[entry.sid] = self._accounts.pop(entry.sid)
        return dropped


def _entry(account: Account) -> CommitEntry:
    seq, first = account.seq, account.seq.num_committed
    most = MAX_CHUNK_TOKENS if account.logprobs is None and first >= 0 else MAX_CHUNK_TOKENS_WITH_LOGPROBS
    count = min(account.num_pending, most if first >= 0 else min(most, -first))
    ends = account.outcome is not None and first + count == account.position
    outcome = account.outcome if ends else None
    finish = outcome.reason if outcome and outcome.reason in ENDINGS else ""
    return CommitEntry(
        seq.sid, seq.epoch, first, count,
        chunk=encode(_chunk(account, first, count, finish)) if count else b"",
        outcome=encode(outcome) if outcome else b"",
    )  # fmt: skip


def _chunk(account: Account, first: int, count: int, finish: str) -> TokenChunk:
    seq = account.seq
    start = seq.num_prompt_tokens + first
    logprobs, ranks = None if account.logprobs is None else tuple(account.logprobs[first : first + count]), None
    if first < 0:
        scores = account.scores[seq.num_to_score + first :][:count]
        logprobs, ranks = tuple((s.logprob, s.top) for s in scores), tuple(s.rank for s in scores)
    return TokenChunk.unchecked(
        first=first, ids=tuple(seq.token_ids[start : start + count]), logprobs=logprobs, finish=finish,
        cached_tokens=seq.cached_tokens if first == 0 else 0, ranks=ranks,
    )  # fmt: skip
