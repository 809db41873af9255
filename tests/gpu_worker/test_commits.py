"""The ledger against a model of the `commit` script, with replies lost before or after they were applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gpu_worker import commits
from services.gpu_worker.batch import SampledToken, Sequence
from services.gpu_worker.commits import Commit, Ledger
from shared.protocol import Outcome, TokenChunk
from shared.scripts import CommitCode, CommitEntry
from shared.wire import decode_as
from tests.gpu_worker.builders import make_sequence


def draw(ledger: Ledger, seq: Sequence, *ids: int) -> None:
    for token_id in ids:
        seq.token_ids.append(token_id)
        ledger.drew(seq, SampledToken(token_id, -0.5, ((token_id, -0.5),)))


def opened(seq: Sequence | None = None) -> tuple[Ledger, Sequence]:
    ledger, seq = Ledger(), seq or make_sequence()
    ledger.open(seq, None if seq.params.logprobs is None else [])
    return ledger, seq


def chunk_of(entry: CommitEntry) -> TokenChunk:
    return decode_as(TokenChunk, entry.chunk)


@dataclass
class Log:
    """What Redis has of one sequence, and how the script answers (see commit.lua)."""

    epoch: int = 1
    ids: list[int] = field(default_factory=list)
    outcome: Outcome | None = None

    def commit(self, e: CommitEntry) -> tuple[CommitCode, int]:
        length, last, code = len(self.ids), e.first + e.count, CommitCode.APPENDED
        if self.outcome is not None:
            return CommitCode.DONE, length
        if e.epoch != self.epoch:
            return CommitCode.STALE, length
        if e.count and e.first == length:
            self.ids += chunk_of(e).ids
        elif last > length:
            return CommitCode.FROM, length
        elif e.count or last < length:
            code = CommitCode.HAVE
        if e.outcome and last == len(self.ids):
            self.outcome = decode_as(Outcome, e.outcome)
        return code, len(self.ids)


def scores(first: int, count: int) -> list[SampledToken]:
    return [SampledToken(i, -0.5 * i, ((i, -0.5 * i),), i + 1) for i in range(first, first + count)]


def test_what_is_known_of_a_prompt_comes_first_and_in_chunks_of_its_own() -> None:
    """Positions below 0, up to -1; the tokens are the prompt's from the second on."""
    ledger, seq = opened(make_sequence(6, num_committed=-5, prompt_logprobs=1))
    assert [(e.first, e.count) for e in ledger.build().entries] == [(-5, 0)] and not ledger.pending
    ledger.scored(seq, scores(0, 3))
    assert ledger.urgent and ledger.is_scoring(seq)
    commit = ledger.build()
    chunk = chunk_of(commit.entries[0])
    assert (chunk.first, list(chunk.ids), chunk.ranks) == (-5, seq.token_ids[1:4], (1, 2, 3))
    assert chunk.logprobs == ((0.0, ((0, 0.0),)), (-0.5, ((1, -0.5),)), (-1.0, ((2, -1.0),)))
    ledger.scored(seq, scores(3, 2))
    draw(ledger, seq, 65)
    assert not ledger.is_scoring(seq)
    ledger.apply(commit, [(CommitCode.APPENDED, -2)])
    commit = ledger.build()
    chunk = chunk_of(commit.entries[0])
    assert (chunk.first, list(chunk.ids), chunk.ranks, chunk.finish) == (-2, seq.token_ids[4:6], (4, 5), "")
    ledger.apply(commit, [(CommitCode.APPENDED, 0)])
    chunk = chunk_of(ledger.build().entries[0])
    assert (chunk.first, chunk.ids, chunk.ranks, chunk.logprobs) == (0, (65,), None, None)


def test_a_log_that_ends_in_the_prompt_is_gone_on_with_there() -> None:
    ledger, seq = opened(make_sequence(6, num_committed=-5, prompt_logprobs=1))
    ledger.scored(seq, scores(0, 5))
    ledger.apply(ledger.build(), [(CommitCode.FROM, -3)])
    chunk = chunk_of(ledger.build().entries[0])
    assert (chunk.first, chunk.ranks) == (-3, (3, 4, 5))


def test_a_long_prompt_is_cut_and_its_end_closes_where_nothing_is_drawn() -> None:
    num_chunk = commits.MAX_CHUNK_TOKENS_WITH_LOGPROBS
    ledger, seq = opened(make_sequence(num_chunk + 3, num_committed=-num_chunk - 2, prompt_logprobs=0, max_tokens=0))
    ledger.scored(seq, scores(0, num_chunk + 2))
    ledger.close(seq, Outcome(reason="length", num_tokens=0))
    first = ledger.build()
    assert (first.entries[0].first, first.entries[0].count, first.entries[0].outcome) == (
        -num_chunk - 2,
        num_chunk,
        b"",
    )
    assert ledger.apply(first, [(CommitCode.APPENDED, -2)]) == []
    last = ledger.build()
    assert chunk_of(last.entries[0]).finish == "length" and last.closing == {("r.0", 1)}
    ledger.apply(last, [(CommitCode.APPENDED, 0)])
    assert not len(ledger)


def test_what_is_preempted_in_its_prompt_closes_without_an_end() -> None:
    ledger, seq = opened(make_sequence(6, num_committed=-5, prompt_logprobs=1))
    ledger.scored(seq, scores(0, 2))
    ledger.close(seq, None)
    commit = ledger.build()
    assert commit.closing == {("r.0", 1)} and (commit.entries[0].count, commit.entries[0].outcome) == (2, b"")
    ledger.apply(commit, [(CommitCode.APPENDED, -3)])
    assert not len(ledger)


def test_a_sequence_in_prefill_goes_along_with_no_tokens() -> None:
    ledger, _ = opened()
    commit = ledger.build()
    assert [(e.sid, e.epoch, e.first, e.count, e.chunk) for e in commit.entries] == [("r.0", 1, 0, 0, b"")]
    assert not ledger.pending and not ledger.urgent and not ledger.build(urgent_only=True).entries


def test_the_first_chunk_says_how_many_tokens_were_cached() -> None:
    ledger, seq = opened(make_sequence(logprobs=1))
    seq.cached_tokens = 4
    draw(ledger, seq, 65)
    commit = ledger.build()
    first = chunk_of(commit.entries[0])
    assert (first.first, first.ids, first.cached_tokens) == (0, (65,), 4)
    assert first.logprobs == ((-0.5, ((65, -0.5),)),)
    ledger.apply(commit, [(CommitCode.APPENDED, 1)])
    draw(ledger, seq, 66, 67)
    second = chunk_of(ledger.build().entries[0])
    assert (second.first, second.ids, second.cached_tokens) == (1, (66, 67), 0)


def test_first_tokens_and_ends_are_urgent_and_go_alone() -> None:
    ledger, seq = opened()
    other = make_sequence(sid="other.0")
    ledger.open(other, None)
    draw(ledger, seq, 65)
    assert ledger.urgent
    commit = ledger.build(urgent_only=True)
    assert [e.sid for e in commit.entries] == ["r.0"]
    ledger.apply(commit, [(CommitCode.APPENDED, 1)])
    draw(ledger, seq, 66)
    assert not ledger.urgent and ledger.pending
    ledger.close(seq, Outcome(reason="length", num_tokens=2))
    assert ledger.urgent


def test_a_lost_reply_that_was_applied_is_answered_with_have_or_from() -> None:
    ledger, seq = opened()
    log = Log()
    draw(ledger, seq, 1, 2)
    log.commit(ledger.build().entries[0])  # its reply is lost
    again = ledger.build()
    assert ledger.apply(again, [log.commit(again.entries[0])]) == [] and seq.num_committed == 2
    draw(ledger, seq, 3)
    log.commit(ledger.build().entries[0])  # again, and more is drawn before it is repeated
    draw(ledger, seq, 4)
    longer = ledger.build()
    answer = log.commit(longer.entries[0])
    assert answer == (CommitCode.FROM, 3)
    ledger.apply(longer, [answer])
    rest = ledger.build()
    assert (rest.entries[0].first, chunk_of(rest.entries[0]).ids) == (3, (4,))
    ledger.apply(rest, [log.commit(rest.entries[0])])
    assert log.ids == seq.token_ids[seq.num_prompt_tokens :]


def test_a_log_that_lost_its_end_is_filled_again() -> None:
    ledger, seq = opened()
    draw(ledger, seq, 1, 2, 3)
    ledger.apply(ledger.build(), [(CommitCode.APPENDED, 3)])
    ledger.apply(ledger.build(), [(CommitCode.FROM, 1)])  # Redis came back with less
    assert chunk_of(ledger.build().entries[0]).ids == (2, 3)


def test_the_last_chunk_carries_the_outcome_and_closes_the_account() -> None:
    ledger, seq = opened()
    draw(ledger, seq, 1, 2)
    ledger.close(seq, Outcome(reason="stop", num_tokens=2))
    commit = ledger.build()
    assert commit.closing == {("r.0", 1)} and chunk_of(commit.entries[0]).finish == "stop"
    assert decode_as(Outcome, commit.entries[0].outcome) == Outcome(reason="stop", num_tokens=2)
    assert ledger.apply(commit, [(CommitCode.APPENDED, 2)]) == [] and len(ledger) == 0


def test_an_error_is_no_ending_that_a_chunk_could_carry() -> None:
    ledger, seq = opened()
    draw(ledger, seq, 1)
    ledger.close(seq, Outcome(reason="error", num_tokens=1, code="engine_error"))
    entry = ledger.build().entries[0]
    assert chunk_of(entry).finish == ""
    assert decode_as(Outcome, entry.outcome).code == "engine_error"


def test_a_finished_sequence_whose_last_reply_was_lost_is_done() -> None:
    ledger, seq = opened()
    draw(ledger, seq, 1)
    ledger.close(seq, Outcome(reason="stop", num_tokens=1))
    assert ledger.apply(ledger.build(), [(CommitCode.DONE, 1)]) == [(("r.0", 1), "done")]
    assert len(ledger) == 0


def test_an_end_without_new_tokens_waits_for_the_log_to_be_complete() -> None:
    ledger, seq = opened(make_sequence(6, 3, num_committed=3))
    ledger.close(seq, Outcome(reason="length", num_tokens=3))
    commit = ledger.build()
    assert commit.entries[0].count == 0 and commit.entries[0].outcome
    ledger.apply(commit, [(CommitCode.FROM, 2)])  # Redis has one token less than this worker thought
    commit = ledger.build()
    assert chunk_of(commit.entries[0]).first == 2 and commit.entries[0].outcome
    ledger.apply(commit, [(CommitCode.APPENDED, 3)])
    assert len(ledger) == 0


def test_a_preempted_sequence_commits_what_it_has_and_is_forgotten() -> None:
    ledger, seq = opened()
    draw(ledger, seq, 1)
    ledger.close(seq, None)
    commit = ledger.build()
    assert commit.entries[0].outcome == b"" and chunk_of(commit.entries[0]).finish == ""
    ledger.apply(commit, [(CommitCode.APPENDED, 1)])
    assert len(ledger) == 0


def test_stale_drops_the_place_and_answers_about_an_older_one_are_ignored() -> None:
    ledger, seq = opened()
    draw(ledger, seq, 1)
    commit = ledger.build()
    ledger.open(make_sequence(epoch=3), None)
    assert ledger.apply(commit, [(CommitCode.STALE, 0)]) == [] and len(ledger) == 1
    assert ledger.apply(ledger.build(), [(CommitCode.STALE, 0)]) == [(("r.0", 3), "stale")]


def test_a_log_longer_than_a_finished_sequence_is_somebody_elses() -> None:
    ledger, seq = opened()
    draw(ledger, seq, 1)
    ledger.close(seq, Outcome(reason="length", num_tokens=1))
    assert ledger.apply(ledger.build(), [(CommitCode.HAVE, 5)]) == [(("r.0", 1), "stale")]


def test_a_log_ahead_of_this_worker_is_caught_up_with() -> None:
    ledger, seq = opened()
    log = Log(ids=[1, 2, 3])
    for token in (1, 2, 3, 4):
        draw(ledger, seq, token)
        for _ in range(2):
            commit = ledger.build()
            assert commit.entries[0].count >= 0
            ledger.apply(commit, [log.commit(commit.entries[0])])
    assert log.ids == [1, 2, 3, 4]


def test_a_backlog_goes_in_pieces_and_nobody_is_left_behind() -> None:
    ledger = Ledger()
    seqs = [make_sequence(sid=f"r{i}.0") for i in range(90)]
    for seq in seqs:
        ledger.open(seq, None)
        draw(ledger, seq, *[7] * 1100)
    logs = {seq.sid: Log() for seq in seqs}
    num_commits = 0
    while ledger.pending:
        commit = ledger.build()
        size = sum(len(e.chunk) + commits.ENTRY_BYTES + len(e.sid) for e in commit.entries)
        assert commit.entries and size <= commits.MAX_COMMIT_BYTES
        ledger.apply(commit, [logs[e.sid].commit(e) for e in commit.entries])
        num_commits += 1
    assert num_commits == 3  # 90 chunks of 4 KiB and the rest
    assert all(log.ids == [7] * 1100 for log in logs.values())


def test_more_sequences_than_a_commit_takes_get_their_turn() -> None:
    ledger = Ledger()
    seqs = [make_sequence(sid=f"r{i}.0") for i in range(commits.MAX_ENTRIES + 10)]
    for seq in seqs:
        ledger.open(seq, None)
    assert ledger.build().complete  # those left out have nothing to say
    draw(ledger, seqs[-1], 1)
    commit = ledger.build()
    assert commit.entries[0].sid == seqs[-1].sid
    ledger.apply(commit, [(CommitCode.APPENDED, e.count) for e in commit.entries])
    for seq in seqs:
        draw(ledger, seq, 1)
    first = ledger.build()
    assert not first.complete
    ledger.apply(first, [(CommitCode.APPENDED, e.first + e.count) for e in first.entries])
    for seq in seqs:
        draw(ledger, seq, 2)
    second = ledger.build()
    left_out = {s.sid for s in seqs} - {e.sid for e in first.entries}
    assert left_out <= {e.sid for e in second.entries[:10]}


def test_a_long_chunk_with_logprobs_is_cut_and_only_the_end_closes() -> None:
    ledger, seq = opened(make_sequence(logprobs=20))
    draw(ledger, seq, *[5] * 200)
    ledger.close(seq, Outcome(reason="length", num_tokens=200))
    commit = ledger.build()
    assert commit.entries[0].count == 128 and not commit.entries[0].outcome and not commit.closing


class CommitMachine(RuleBasedStateMachine):
    """Two sequences are drawn, cut, closed and committed; replies get lost; Redis may forget its newest tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.seqs = [make_sequence(sid=f"r{i}.0", max_tokens=100) for i in range(2)]
        self.logs = {seq.sid: Log() for seq in self.seqs}
        self.closed: set[str] = set()
        for seq in self.seqs:
            self.ledger.open(seq, None)

    @rule(which=st.integers(0, 1), count=st.integers(1, 3))
    def draw_tokens(self, which: int, count: int) -> None:
        seq = self.seqs[which]
        if seq.sid not in self.closed:
            start = seq.num_output_tokens
            draw(self.ledger, seq, *range(start, start + count))

    @rule(which=st.integers(0, 1))
    def close(self, which: int) -> None:
        seq = self.seqs[which]
        if seq.sid not in self.closed:
            self.closed.add(seq.sid)
            self.ledger.close(seq, Outcome(reason="stop", num_tokens=seq.num_output_tokens))

    def answers(self, commit: Commit) -> list[tuple[CommitCode, int]]:
        return [self.logs[e.sid].commit(e) for e in commit.entries]

    @rule(urgent_only=st.booleans())
    def commit(self, urgent_only: bool) -> None:
        commit = self.ledger.build(urgent_only)
        dropped = self.ledger.apply(commit, self.answers(commit))
        assert all(sid in self.closed for (sid, _), _ in dropped)  # only after a lost reply to its last chunk

    @rule()
    def commit_and_lose_the_reply(self) -> None:
        self.answers(self.ledger.build())

    @rule()
    def lose_a_commit(self) -> None:
        self.ledger.build()

    @precondition(lambda self: any(log.outcome is None and log.ids for log in self.logs.values()))
    @rule()
    def redis_forgets(self) -> None:
        for log in self.logs.values():
            if log.outcome is None:
                del log.ids[-2:]

    @invariant()
    def logs_hold_what_was_drawn(self) -> None:
        for seq in self.seqs:
            log = self.logs[seq.sid]
            output = seq.token_ids[seq.num_prompt_tokens :]
            assert log.ids == output[: len(log.ids)]
            assert log.outcome is None or (seq.sid in self.closed and log.ids == output)

    def teardown(self) -> None:
        for _ in range(6):
            commit = self.ledger.build()
            self.ledger.apply(commit, self.answers(commit))
        for seq in self.seqs:
            log = self.logs[seq.sid]
            assert log.ids == seq.token_ids[seq.num_prompt_tokens :]
            assert (log.outcome is not None) == (seq.sid in self.closed)
        assert len(self.ledger) == len(self.seqs) - len(self.closed)


TestCommitMachine = CommitMachine.TestCase
TestCommitMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
