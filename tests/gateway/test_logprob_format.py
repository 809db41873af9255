from __future__ import annotations

import json

from services.gateway.choice_stream import TokenLogprob
from services.gateway.logprob_format import LogprobFormat, TokenDetails
from tests.gateway.tiny_tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer([b"a", b"b", b"c", b"\xf0"], ["<s>"])
PROMPT = (
    TokenLogprob(0, None, (), 0),
    TokenLogprob(2, -3.0, ((1, -0.5), (0, -1.0)), 1, rank=7),
    TokenLogprob(1, -0.25, ((1, -0.25), (2, -2.0)), 2, rank=1),
)
DRAWN = (TokenLogprob(3, -1.0, ((3, -1.0),), 3),)


def format_of(details: TokenDetails, *, with_logprobs: bool = True, chat: bool = False) -> LogprobFormat:
    return LogprobFormat(TOKENIZER, details, chat=chat, with_logprobs=with_logprobs)


def test_an_echo_has_what_drawn_tokens_have_and_null_for_the_first() -> None:
    written = format_of(TokenDetails(num_echoed=1))
    assert written.of_delta(PROMPT, DRAWN) == {
        "tokens": ["a", "c", "b", "bytes:\\xf0"],
        "token_logprobs": [None, -3.0, -0.25, -1.0],
        "top_logprobs": [None, {"b": -0.5, "c": -3.0}, {"b": -0.25}, {"bytes:\\xf0": -1.0}],
        "text_offset": [0, 1, 2, 3],
    }
    whole = json.loads(written.whole(written.written(PROMPT, DRAWN)))
    assert whole == written.of_delta(PROMPT, DRAWN)


def test_without_an_echo_a_prompt_has_no_part_in_them() -> None:
    written = format_of(TokenDetails(num_prompt=1))
    assert written.of_delta(PROMPT, ()) is None
    assert written.of_delta(PROMPT, DRAWN) == written.of_delta((), DRAWN)
    assert format_of(TokenDetails(num_echoed=1), with_logprobs=False).written(PROMPT, DRAWN) == []


def test_prompt_logprobs_are_vllm_s() -> None:
    written = format_of(TokenDetails(num_prompt=1), with_logprobs=False)
    field = written.prompt_whole(written.prompt_written(PROMPT))
    assert field.endswith(b",")
    assert json.loads(b"{" + field[:-1] + b"}") == {
        "prompt_logprobs": [
            None,
            {
                "2": {"logprob": -3.0, "rank": 7, "decoded_token": "c"},
                "1": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            },
            {"1": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
        ]
    }
    assert format_of(TokenDetails()).prompt_whole([]) == b"" and format_of(TokenDetails()).prompt_written(PROMPT) == []


def test_tokens_may_go_by_their_ids() -> None:
    """Which no two tokens share, while several may have one text."""
    plain = format_of(TokenDetails(as_ids=True)).of_delta((), DRAWN)
    assert plain is not None
    assert (plain["tokens"], plain["top_logprobs"]) == (["token_id:3"], [{"token_id:3": -1.0}])
    [entry] = (format_of(TokenDetails(as_ids=True), chat=True).of_delta((), DRAWN) or {})["content"]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == "token_id:3" and entry["bytes"] == [0xF0]
