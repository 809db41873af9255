"""What a client sees is a function of the request and the first p tokens: against a brute-force oracle, for any cut."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.choice_stream import ChoiceStream, Delta, GapError
from services.gateway.tokenization import Tokenizer
from shared.protocol import SamplingParams, TextParams, TokenChunk
from tests.gateway.tiny_tokenizers import tiny_tokenizer

PIECES = [b"a", b"b", b" c", b"ab", b"\n", b"\n\n", "é".encode(), b"\xf0\x9f", b"\xa6", b"\x8a", b"\xff", b"", b"<"]
SPECIAL = ["<s>", "<e>"]
TOKENIZER = tiny_tokenizer(PIECES, SPECIAL)
BOS, EOS = len(PIECES), len(PIECES) + 1


@dataclass
class Request:
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    stop_ids: tuple[int, ...] = (EOS,)
    min_tokens: int = 0
    max_tokens: int = 100
    logprobs: bool = False

    def stream(
        self, tokenizer: Tokenizer = TOKENIZER, resume_at: int | None = None, resume_finished: bool = False
    ) -> ChoiceStream:
        text = TextParams(
            api="completions",
            stop=self.stop,
            include_stop_str_in_output=self.include_stop,
            skip_special_tokens=self.skip_special,
        )
        sampling = SamplingParams(
            max_tokens=self.max_tokens, min_tokens=self.min_tokens, seed=0, stop_token_ids=self.stop_ids
        )
        return ChoiceStream(text, sampling, tokenizer, resume_at=resume_at, resume_finished=resume_finished)


@dataclass
class Seen:
    """What a client has after some events."""

    text: str
    finish_reason: str | None
    num_tokens: int


def certain(data: bytes, last: bool) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, last)


def find(before: str, now: str, stops: Sequence[str]) -> list[tuple[int, int, str]]:
    """(start, length, stop) of the stop strings that end in what is new."""
    return [
        (start, len(stop), stop)
        for stop in stops
        for start in range(len(now))
        if now.startswith(stop, start) and start + len(stop) > len(before)
    ]


def oracle(request: Request, ids: Sequence[int], finish: str = "") -> Seen:
    """Everything anew for each token, from whole byte strings; slow and plain."""
    special_stops = [s for s in request.stop if any(t in s for t in SPECIAL)] if request.skip_special else []
    skipped = {BOS, EOS} if request.skip_special else set()
    visible_bytes = full_bytes = b""
    visible, full = [""], [""]  # after each number of tokens
    for k, token in enumerate(ids, 1):
        may_stop = k > request.min_tokens
        closes = k == len(ids) and bool(finish)
        is_end = token in request.stop_ids and (may_stop or (closes and finish == "stop"))
        last = is_end or closes or k >= request.max_tokens
        full_bytes += TOKENIZER.token_bytes(token)
        if not is_end and token not in skipped:
            visible_bytes += TOKENIZER.token_bytes(token)
        visible.append(certain(visible_bytes, last))
        full.append(certain(full_bytes, last))
        found = find(visible[-2], visible[-1], request.stop)
        for start, length, stop in find(full[-2], full[-1], special_stops):
            holder = max(j for j in range(k) if len(full[j]) <= start)
            place = min(len(visible[holder]) + start - len(full[holder]), len(visible[holder + 1]))
            found.append((place, length, stop))
        if found and may_stop:
            start, _, stop = min(found)
            return Seen(visible[-1][:start] + (stop if request.include_stop else ""), "stop", k)
        if is_end:
            return Seen(visible[-1], "stop", k)
        if last:
            return Seen(visible[-1], finish if closes else "length", k)
    return Seen(visible[-1], None, len(ids))


def chunks(ids: Sequence[int], cuts: Sequence[int], finish: str) -> list[TokenChunk]:
    edges = [0, *sorted({c % len(ids) for c in cuts} - {0}), len(ids)] if ids else [0, 0]
    pairs = list(zip(edges, edges[1:], strict=False))
    return [TokenChunk(first=a, ids=tuple(ids[a:b]), finish=finish if (a, b) == pairs[-1] else "") for a, b in pairs]


def see(stream: ChoiceStream, parts: Sequence[TokenChunk]) -> tuple[list[Delta], Seen]:
    deltas = stream.open() + [d for part in parts for d in stream.feed(part)]
    reasons = [d.finish_reason for d in deltas if d.finish_reason]
    assert len(reasons) <= 1 and (not reasons or deltas[-1].finish_reason)
    return deltas, Seen("".join(d.text for d in deltas), stream.finish_reason, stream.num_tokens)


requests = st.builds(
    Request,
    stop=st.lists(
        st.text("ab c\n<", min_size=1, max_size=3)
        | st.sampled_from(["<e>", "<s>", "b<s>", "<s>a", "b<s>a", "<e>\n", "\ufffd", "é", "🦊"]),
        max_size=3,
    ).map(tuple),
    include_stop=st.booleans(),
    skip_special=st.booleans(),
    stop_ids=st.sampled_from([(), (EOS,), (EOS, 0)]),
    min_tokens=st.integers(0, 3),
    max_tokens=st.integers(1, 12),
)
token_lists = st.lists(st.integers(0, EOS), max_size=10)
finishes = st.sampled_from(["", "length", "stop"])


@given(requests, token_lists, finishes, st.lists(st.integers(0, 20), max_size=6))
def test_any_cut_gives_what_the_oracle_says(request_: Request, ids: list[int], finish: str, cuts: list[int]) -> None:
    expected = oracle(request_, ids, finish)
    if not ids and finish:
        expected.finish_reason = finish
    deltas, seen = see(request_.stream(), chunks(ids, cuts, finish))
    if expected.finish_reason is None:  # some may be held back
        assert expected.text.startswith(seen.text)
        seen.text = expected.text
    assert seen == expected
    for delta in deltas:
        assert delta.text or delta.finish_reason


@given(
    requests, token_lists, finishes, st.lists(st.integers(0, 20), max_size=6), st.lists(st.integers(0, 20), max_size=6)
)
def test_another_gateway_goes_on_exactly_where_the_client_is(
    request_: Request, ids: list[int], finish: str, cuts: list[int], other_cuts: list[int]
) -> None:
    whole, seen = see(request_.stream(), chunks(ids, cuts, finish))
    for i, delta in enumerate(whole):
        resumed = request_.stream(resume_at=delta.position, resume_finished=delta.finish_reason is not None)
        rest, end = see(resumed, chunks(ids, other_cuts, finish))
        text = "".join(d.text for d in rest)
        assert "".join(d.text for d in whole[: i + 1]) + text == seen.text
        assert (end.finish_reason, end.num_tokens) == (seen.finish_reason, seen.num_tokens)
        assert [d.finish_reason for d in rest if d.finish_reason] == (
            [] if delta.finish_reason or not seen.finish_reason else [seen.finish_reason]
        )


@given(token_lists, st.lists(st.tuples(st.integers(0, 10), st.integers(0, 5)), max_size=8))
def test_overlap_is_dropped_and_a_gap_is_told(ids: list[int], spans: list[tuple[int, int]]) -> None:
    request_ = Request(stop_ids=())
    stream, text = request_.stream(), ""
    for first, length in spans:
        part = TokenChunk(first=first, ids=tuple(ids[first : first + length]))
        fed = stream.num_tokens
        if first > fed:
            with pytest.raises(GapError) as e:
                stream.feed(part)
            assert e.value.expected == fed == stream.num_tokens
        else:
            text += "".join(d.text for d in stream.feed(part))
            assert stream.num_tokens == max(fed, first + len(part.ids))
    text += "".join(d.text for d in stream.close("length"))
    assert text == oracle(request_, ids[: stream.num_tokens], "length").text


def test_after_the_end_nothing_is_shown() -> None:
    stream = Request().stream()
    assert stream.feed(TokenChunk(first=0, ids=(0, EOS, 1, 1))) == [Delta("a", 2, finish_reason="stop")]
    assert stream.feed(TokenChunk(first=4, ids=(1,), finish="length")) == []
    assert stream.close("length") == [] and stream.num_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "stop", "include", "text", "num_tokens"),
    [
        (["a", " b", " c", " d", " e"], ("b c d",), False, "a ", 4),
        (["a", " b", " c", " d", " e"], ("b c d",), True, "a b c d", 4),
        (["zb", " c", " dq"], ("b c d",), False, "z", 3),
        (["x", "\n", "\n", "y"], ("\n\n",), False, "x", 3),
        (["x", "\n\n", "y"], ("\n\n",), False, "x", 2),
        (["ab", "cdX", "e"], ("dX", "cd"), False, "ab", 2),
        (["x", "yz"], ("z", "yz"), False, "x", 2),
    ],
)
def test_stop_strings_over_tokens(
    pieces: list[str], stop: tuple[str, ...], include: bool, text: str, num_tokens: int
) -> None:
    tokenizer = tiny_tokenizer(pieces)
    parts = [TokenChunk(first=i, ids=(i,)) for i in range(len(pieces))]
    _, seen = see(Request(stop=stop, include_stop=include, stop_ids=()).stream(tokenizer), parts)
    assert seen == Seen(text, "stop", num_tokens)


@pytest.mark.parametrize(
    ("request_", "text", "num_tokens"),
    [
        (Request(stop_ids=(4,)), "Hi there", 5),
        (Request(stop_ids=(4,), skip_special=False), "<s>Hi<s> there", 5),
        (Request(stop_ids=(), stop=("<e>",)), "Hi there", 5),
        (Request(stop_ids=(), stop=("<e>",), skip_special=False), "<s>Hi<s> there", 5),
        (Request(stop_ids=(), stop=("<e>",), include_stop=True), "Hi there<e>", 5),
        (Request(stop_ids=(), stop=("Hi<s> th",)), "", 4),
        (Request(stop_ids=(), stop=("Hi th",)), "", 4),
        (Request(stop_ids=(4,), stop=("there<e>",)), "Hi ", 5),
    ],
)
def test_detokenisation_of_special_tokens(request_: Request, text: str, num_tokens: int) -> None:
    tokenizer = tiny_tokenizer(["Hi", " there", "?"], ["<s>", "<e>"])
    parts = [TokenChunk(first=i, ids=(t,)) for i, t in enumerate([3, 0, 3, 1, 4, 2])]
    _, seen = see(request_.stream(tokenizer), parts)
    assert seen == Seen(text, "stop", num_tokens)


def test_utf8_stream_of_a_character_in_byte_tokens() -> None:
    tokenizer = tiny_tokenizer([b"\xf0", b"\x9f", b"\xa6", b"\x8a", b" ok"])
    parts = [TokenChunk(first=i, ids=(i,)) for i in range(5)]
    deltas, seen = see(Request(stop_ids=(), max_tokens=5).stream(tokenizer), parts)
    assert [d.text for d in deltas] == ["🦊", " ok"] and seen == Seen("🦊 ok", "length", 5)
    deltas, seen = see(Request(stop_ids=(), max_tokens=3).stream(tokenizer), parts)
    assert [d.text for d in deltas] == ["\ufffd"] and seen == Seen("\ufffd", "length", 3)


def test_a_stop_may_not_end_within_min_tokens_but_may_begin_there() -> None:
    tokenizer = tiny_tokenizer(["a", "b", "x"])
    ids = (0, 1, 2, 0, 1)  # a b x a b
    request_ = Request(stop=("ab",), stop_ids=(2,), min_tokens=3)
    assert see(request_.stream(tokenizer), [TokenChunk(first=0, ids=ids)])[1] == Seen("abx", "stop", 5)
    request_ = Request(stop=("ab",), stop_ids=(), min_tokens=1)
    assert see(request_.stream(tokenizer), [TokenChunk(first=0, ids=ids)])[1] == Seen("", "stop", 2)


def test_holds_back_only_what_may_become_a_stop() -> None:
    tokenizer = tiny_tokenizer(["one", " tw", "o", " three"])
    stream = Request(stop=(" two!",), stop_ids=()).stream(tokenizer)
    texts = [[d.text for d in stream.feed(TokenChunk(first=i, ids=(i,)))] for i in range(4)]
    assert texts == [["one"], [], [], [" two three"]]


def test_logprobs_come_with_their_token_and_say_where_its_text_begins() -> None:
    tokenizer = tiny_tokenizer(["ab", "c", "de"], ["<e>"])
    stream = Request(stop=("cX",), stop_ids=(3,)).stream(tokenizer)
    logprobs = ((-0.5, ((0, -0.5), (1, -1.0))), (-1.0, ()), (-2.0, ()), (-3.0, ()))
    first, *_ = stream.feed(TokenChunk(first=0, ids=(0, 1), logprobs=logprobs[:2]))
    assert first.text == "ab" and [(e.token_id, e.offset) for e in first.logprobs] == [(0, 0), (1, 2)]
    assert first.logprobs[0].top == ((0, -0.5), (1, -1.0))
    rest, *_ = stream.feed(TokenChunk(first=2, ids=(2, 3), logprobs=logprobs[2:]))
    assert rest.text == "cde" and [(e.token_id, e.logprob, e.offset) for e in rest.logprobs] == [
        (2, -2.0, 3),
        (3, -3.0, 5),
    ]


def test_echo_and_nothing_to_generate() -> None:
    tokenizer = tiny_tokenizer(["Once", " upon"], ["<s>"], bos="<s>")
    text = TextParams(api="completions", echo=True)
    sampling = SamplingParams(max_tokens=0, seed=0)
    stream = ChoiceStream(text, sampling, tokenizer, prompt_ids=[2, 0, 1])
    assert stream.open() == [Delta("Once upon", 0, finish_reason="length")]
    assert stream.feed(TokenChunk(first=0, ids=(0,))) == [] and stream.num_tokens == 0
    more = ChoiceStream(text, SamplingParams(max_tokens=1, seed=0), tokenizer, prompt_ids=[2, 0])
    assert more.open() == [Delta("Once", 0)]
    assert more.feed(TokenChunk(first=0, ids=(1,), cached_tokens=1)) == [Delta(" upon", 1, finish_reason="length")]
    assert more.cached_tokens == 1
    resumed = ChoiceStream(text, sampling, tokenizer, prompt_ids=[2, 0, 1], resume_at=0)
    assert resumed.open() == [] and resumed.finish_reason == "length"


def test_the_worker_may_end_a_choice_without_a_token() -> None:
    stream = Request(stop=("abc",), stop_ids=()).stream()
    assert stream.feed(TokenChunk(first=0, ids=(3,))) == []  # "ab" is held back
    assert stream.feed(TokenChunk(first=1, ids=(), finish="length")) == [Delta("ab", 1, finish_reason="length")]


@pytest.mark.parametrize(
    ("begun", "pieces", "num"),
    [
        (True, ["a", "b", "</think>", "a", "b"], 3),
        (True, ["a", "b", "</", "think>a", "b"], 4),  # one token may be both
        (False, ["<think>", "a", "</think>", "a"], 3),
        (False, ["a", "b"], 0),
        (True, ["a", "b"], 2),
    ],
)
def test_tokens_of_thoughts_are_counted_however_the_answer_was_cut(begun: bool, pieces: list[str], num: int) -> None:
    tokenizer = tiny_tokenizer([piece.encode() for piece in pieces])
    text = TextParams(api="chat", reasoning_format="deepseek_r1", reasoning_begun=begun)
    for cut in range(len(pieces)):
        stream = ChoiceStream(text, SamplingParams(max_tokens=len(pieces), seed=0), tokenizer)
        for part in chunks(list(range(len(pieces))), [cut], ""):
            stream.feed(part)
        assert stream.finish_reason == "length" and stream.num_reasoning_tokens == num
