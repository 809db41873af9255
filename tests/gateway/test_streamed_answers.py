"""What a stream says, put together, is what the whole answer says, field by field, for every split into chunks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.choice_stream import ChoiceStream
from services.gateway.responses import ChoiceResult, ResponseBuilder, usage
from shared.protocol import SamplingParams, TextParams, TokenChunk
from tests.assembly import assemble
from tests.gateway.tiny_tokenizers import tiny_tokenizer

PIECES: list[bytes | str] = [
    "Hi", " there", "\n", " ", "é", b"\xf0\x9f", b"\xa6\x8a", b"\xff", "", "<", "<thi", "nk>", "hm. ", "</think", ">",
    "<tool_call>", '{"name": "f', '", "argu', 'ments": {"a": [', '"}]", 1', "]}}", "</tool_", "call>", "; ", "{}",
]  # fmt: skip
TOKENIZER = tiny_tokenizer(PIECES, ["<s>", "<e>"])
BOS, EOS = len(PIECES), len(PIECES) + 1
CALL = [PIECES.index(p) for p in ("<tool_call>", '{"name": "f', '", "argu', 'ments": {"a": [', '"}]", 1', "]}}")]
CLOSED = [*CALL, PIECES.index("</tool_"), PIECES.index("call>")]
THOUGHT = [PIECES.index(p) for p in ("<thi", "nk>", "\n", "hm. ", "</think", ">", "\n")]
FOX = [PIECES.index(b"\xf0\x9f"), PIECES.index(b"\xa6\x8a")]
MAX_TOKENS = 9  # 256 splits
STOPS = ["there", "e\n", "<e>", "é", "🦊", "}}", ">", "hm", "\ufffd", "n"]


@dataclass(frozen=True)
class Case:
    """finish: what the worker says of the end, with the last token, or by itself where that is not told."""

    text: TextParams
    ids: tuple[int, ...]
    finish: str
    sampling: SamplingParams

    def stream(self) -> ChoiceStream:
        return ChoiceStream(self.text, self.sampling, TOKENIZER, prompt_ids=(0, 1))

    def builder(self) -> ResponseBuilder:
        api: Literal["chat", "completions"] = self.text.api
        return ResponseBuilder(
            api, TOKENIZER, id="x", model="m", created=1, with_logprobs=self.sampling.logprobs is not None,
            include_usage=True, may_call=bool(self.text.tool_format),
        )  # fmt: skip

    def chunk(self, first: int, end: int) -> TokenChunk:
        logprobs = None
        if self.sampling.logprobs is not None:
            logprobs = tuple((-0.5, ((i, -0.5), (0, -float("inf")))) for i in self.ids[first:end])
        finish = self.finish if end == len(self.ids) else ""
        return TokenChunk(first=first, ids=self.ids[first:end], logprobs=logprobs, finish=finish)


def splits(length: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut so many tokens into chunks."""
    for inner in itertools.product((False, True), repeat=max(0, length - 1)):
        edges = [0, *(i for i, cut in enumerate(inner, 1) if cut), length]
        yield list(zip(edges, edges[1:], strict=False))


def whole(case: Case) -> Any:
    stream, builder = case.stream(), case.builder()
    result = ChoiceResult(builder)
    result.add(stream.open())
    result.add(stream.feed(case.chunk(0, len(case.ids))))
    if stream.finish_reason is None:
        result.add(stream.close("length"))
    return json.loads(builder.whole([result], usage(2, stream.num_tokens, 0)))


def streamed(case: Case, chunks: Sequence[tuple[int, int]]) -> Any:
    stream, builder = case.stream(), case.builder()
    deltas = stream.open()
    for first, end in chunks:
        deltas += stream.feed(case.chunk(first, end))
    if stream.finish_reason is None:
        deltas += stream.close("length")
    opening = builder.opening(0)
    parts = [opening] if opening else []
    parts += [json.loads(json.dumps(builder.chunk(0, delta), allow_nan=False)) for delta in deltas]
    return assemble([*parts, builder.usage_chunk(usage(2, stream.num_tokens, 0))])


def case_of(api: Literal["chat", "completions"], ids: list[int], finish: str, **options: Any) -> Case:
    max_tokens = max(options.pop("max_tokens", 100), api == "chat")  # a chat wants at least one
    sampling = SamplingParams(
        max_tokens=max_tokens, min_tokens=options.pop("min_tokens", 0), seed=0,
        stop_token_ids=options.pop("stop_ids", (EOS,)), logprobs=options.pop("logprobs", None),
    )  # fmt: skip
    only_chat = {k: options.pop(k) for k in ("tool_format", "max_calls", "reasoning_format", "reasoning_begun",
                                             "include_reasoning") if k in options}  # fmt: skip
    if api == "chat":
        options |= only_chat | {"tool_names": ("f",), "echo": False}
    return Case(TextParams(api=api, **options), tuple(ids), finish, sampling)


answers = st.lists(
    st.sampled_from([*([i] for i in range(EOS + 1)), CALL, CLOSED, THOUGHT, FOX]), max_size=MAX_TOKENS
).map(lambda parts: [i for part in parts for i in part][:MAX_TOKENS])
cases = st.builds(
    case_of,
    st.sampled_from(["chat", "chat", "completions"]),
    answers,
    st.sampled_from(["", "length", "stop"]),
    stop=st.lists(st.sampled_from(STOPS), max_size=2).map(tuple),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    echo=st.booleans(),
    tool_format=st.sampled_from(["", "hermes", "generic", "mistral", "llama3_json", "pythonic"]),
    max_calls=st.sampled_from([None, 1]),
    reasoning_format=st.sampled_from(["", "deepseek_r1"]),
    reasoning_begun=st.booleans(),
    include_reasoning=st.booleans(),
    max_tokens=st.sampled_from([0, 1, 3, 100]),
    min_tokens=st.sampled_from([0, 0, 2]),
    stop_ids=st.sampled_from([(), (EOS,), (EOS, 3)]),
    logprobs=st.sampled_from([None, 0, 2]),
)  # fmt: skip


@given(cases)
@example(case_of("chat", [EOS], "stop", tool_format="hermes"))
@example(case_of("chat", [*THOUGHT, *CALL[:4]], "length", tool_format="hermes", reasoning_format="deepseek_r1"))
@example(case_of("chat", CLOSED, "stop", tool_format="hermes", logprobs=2))
@example(case_of("completions", [0, *FOX, 1, EOS], "stop", stop=("there",), logprobs=1, echo=True))
def test_any_split_says_what_the_whole_answer_says(case: Case) -> None:
    expected = whole(case)
    for chunks in splits(len(case.ids)):
        assert streamed(case, chunks) == expected, chunks
