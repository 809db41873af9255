from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.gpu_worker.admission import Admission, NotRunnable, finish_reason, read_admission, sequence_of
from services.gpu_worker.batch import SampledToken
from shared.protocol import RequestSpec, TextParams, TokenChunk
from shared.records import RequestRecord, SequenceRecord
from shared.wire import ProtocolError, pack_ids
from tests.gpu_worker.builders import make_admit, make_params, make_sequence


def request(**params: object) -> RequestRecord:
    spec = RequestSpec(
        rid="r", num_choices=2, num_prompt_tokens=3, salt=b"s" * 32, sampling=make_params(**params),
        text=TextParams(api="chat"),
    )  # fmt: skip
    return RequestRecord(spec, pack_ids([1, 2, 3]), "")


def record(**fields: Any) -> SequenceRecord:
    values = {
        "state": "placed", "epoch": 2, "worker": "w", "gateway": "g", "attach": 1, "num_tokens": 0, "strikes": 0,
        "num_prompt_tokens": 3, "outcome": b"",
    }  # fmt: skip
    return SequenceRecord(**(values | fields))


ADMIT = make_admit("r.1", epoch=2, block_ids=(5, 6), cached_length=0, alone=True)


def test_prompt_and_log_make_the_sequence() -> None:
    log = [TokenChunk(first=0, ids=(4, 5)), TokenChunk(first=2, ids=(6,))]
    admission = read_admission(ADMIT, "w", request(), record(), log)
    assert isinstance(admission, Admission)
    seq = sequence_of(ADMIT, admission, 300)
    assert (seq.sid, seq.epoch, seq.choice, seq.alone, seq.salt) == ("r.1", 2, 1, True, b"s" * 32)
    assert (seq.token_ids, seq.num_prompt_tokens, seq.num_committed) == ([1, 2, 3, 4, 5, 6], 3, 3)
    assert seq.block_ids == [5, 6]


def test_predicted_tokens_that_the_model_does_not_have_are_left_out() -> None:
    predicted = request()
    spec = predicted.spec.model_copy(update={"prediction": pack_ids([299, 300, 5, 1 << 31])})
    admission = read_admission(ADMIT, "w", replace(predicted, spec=spec), record(), [])
    assert isinstance(admission, Admission) and admission.prediction == (299, 300, 5, 1 << 31)
    assert sequence_of(ADMIT, admission, 300).prediction == (299, 5)


def test_what_the_log_has_of_a_prompt_is_not_output() -> None:
    chunks = [
        TokenChunk(first=-2, ids=(2,), logprobs=((-1.0, ()),), ranks=(3,)),
        TokenChunk(first=-1, ids=(3,), logprobs=((-2.0, ((9, -0.1),)),), ranks=(5,)),
        TokenChunk(first=0, ids=(4,)),
    ]
    seen = []
    for log in (chunks[:0], chunks[:1], chunks[:2], chunks):
        admission = read_admission(ADMIT, "w", request(prompt_logprobs=1), record(), log)
        assert isinstance(admission, Admission)
        seq = sequence_of(ADMIT, admission, 300)
        seen.append((seq.token_ids, seq.num_committed, seq.score_from, seq.is_scoring))
    assert seen == [
        ([1, 2, 3], -2, 0, True), ([1, 2, 3], -1, 1, True), ([1, 2, 3], 0, 2, False), ([1, 2, 3, 4], 1, 2, False),
    ]  # fmt: skip
    assert admission.scores == (SampledToken(2, -1.0, (), 3), SampledToken(3, -2.0, ((9, -0.1),), 5))
    with pytest.raises(ProtocolError, match="gap at -2"):
        read_admission(ADMIT, "w", request(prompt_logprobs=1), record(), chunks[2:])
    with pytest.raises(ProtocolError, match="gap at 0"):
        read_admission(ADMIT, "w", request(), record(), chunks)


def test_logprobs_of_the_log_are_kept() -> None:
    chunk = TokenChunk(first=0, ids=(4,), logprobs=((-1.0, ((4, -1.0),)),))
    admission = read_admission(ADMIT, "w", request(logprobs=1), record(), [chunk])
    assert isinstance(admission, Admission) and admission.logprobs == [(-1.0, ((4, -1.0),))]


@pytest.mark.parametrize(
    "fields", [{"state": "done"}, {"state": "queued"}, {"epoch": 1}, {"epoch": 3}, {"worker": "other"}]
)
def test_a_place_that_is_not_current_is_stale(fields: dict[str, object]) -> None:
    assert read_admission(ADMIT, "w", request(), record(**fields), []) == NotRunnable("stale")


def test_missing_records_are_stale() -> None:
    assert read_admission(ADMIT, "w", None, record(), []) == NotRunnable("stale")
    assert read_admission(ADMIT, "w", request(), None, []) == NotRunnable("stale")


@pytest.mark.parametrize(
    "params, chunk", [({}, TokenChunk(first=1, ids=(4,))), ({"logprobs": 1}, TokenChunk(first=0, ids=(4,)))]
)
def test_a_log_that_contradicts_itself_cannot_be_read(params: dict[str, object], chunk: TokenChunk) -> None:
    with pytest.raises(ProtocolError):
        read_admission(ADMIT, "w", request(**params), record(), [chunk])


def test_cached_tokens_never_count_the_whole_prompt() -> None:
    admission = Admission(make_params(), list(range(8)), b"s" * 32, list(range(9)), None)
    assert sequence_of(make_admit(block_ids=range(5), cached_length=16), admission, 300).cached_tokens == 7


@pytest.mark.parametrize(
    "num_output, params, reason",
    [
        (2, {"max_tokens": 3}, ""),
        (3, {"max_tokens": 3}, "length"),
        (3, {"max_tokens": 9, "stop": True}, "stop"),
        (3, {"max_tokens": 3, "stop": True}, "stop"),
        (3, {"max_tokens": 9, "stop": True, "min_tokens": 2}, "stop"),
        (3, {"max_tokens": 9, "stop": True, "min_tokens": 3}, ""),
        (0, {"max_tokens": 9, "stop": True}, ""),
        (14, {"max_tokens": 99}, "length"),
    ],
)
def test_finish_reason(num_output: int, params: dict[str, Any], reason: str) -> None:
    stop = params.pop("stop", False)
    seq = make_sequence(6, num_output, **params)
    if stop:
        seq.params = make_params(**params, stop_token_ids=(seq.token_ids[-1],))
    assert finish_reason(seq, max_num_tokens=20) == reason
