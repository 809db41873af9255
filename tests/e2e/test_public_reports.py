"""Faults of kinds that other servers have had, tried on a whole stack; each is followed by an ordinary request.

Here is what a client sees; what concerns one part alone is tested there. Names begin with the kind, and docs/faults.md
lists the tests of each.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared import scripted_vocab as vocab
from tests.e2e.clients import Client
from tests.e2e.load import USAGE, chat, plain, prompt_ids, words
from tests.e2e.stack import Stack

BOS, EOS = "<bos>", "<eos>"
Json = dict[str, Any]
FUNCTION: Json = {"type": "function", "function": {"name": "f"}}


@contextlib.asynccontextmanager
async def then_an_ordinary_request(client: Client, stack: Stack) -> AsyncIterator[None]:
    """On the same processes."""
    pids = [p.pid for p in stack.processes()]
    yield
    answer = await client.ask(plain("ordinary", 12))
    answer.check()
    assert answer.text == words("ordinary", 12)
    assert await client.get("/health/ready") == (200, {"status": "ready"})
    assert pids == [p.pid for p in stack.processes()] and all(p.popen.poll() is None for p in stack.processes())


@pytest.fixture
async def ordinary(client: Client, shared_stack: Stack) -> AsyncIterator[None]:
    async with then_an_ordinary_request(client, shared_stack):
        yield


async def refused(client: Client, path: str, body: Json | bytes, param: str | None) -> Json:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.session.post(client.url + path, data=io.BytesIO(data)) as response:
        answer: Json = json.loads(await response.text())
        assert response.status == 400 and response.content_type == "application/json", answer
    assert param is None or answer["error"]["param"] == param, answer
    return answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_detokenisation_special_tokens_are_not_text(
    client: Client, api: str, stream: bool, ordinary: None
) -> None:
    script = f"say <script>{BOS}Hi{BOS} there"
    ask = chat if api == "chat" else plain
    options = {"stream": stream, "logprobs": True if api == "chat" else 0, **(USAGE if stream else {})}
    hidden = await client.ask(ask(script, 40, **options))
    shown = await client.ask(ask(script, 40, skip_special_tokens=False, **options))
    stopped = await client.ask(ask(script, 40, stop=[BOS + " th"], **options))
    at_end = await client.ask(ask(script, 40, stop=[EOS], ignore_eos=True, **options))
    assert (hidden.text, shown.text, stopped.text, at_end.text) == ("Hi there", f"{BOS}Hi{BOS} there", "Hi", "Hi there")
    for answer in (hidden, shown, stopped, at_end):
        answer.check()
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage and len(answer.choices[0].tokens) == answer.usage["completion_tokens"]
    assert hidden.usage and hidden.usage["completion_tokens"] == 11


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "fields",
    [{"min_tokens": 100_000_000, "max_tokens": None}, {"min_tokens": -5}, {"min_tokens": 8, "max_tokens": 4},
     {"min_tokens": 10_000, "max_tokens": None}],
)  # fmt: skip
async def test_parameter_extremes_a_minimum_above_the_maximum(
    client: Client, path: str, fields: Json, ordinary: None
) -> None:
    base: Json = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    await refused(client, path, base | fields, "min_tokens")


async def test_chat_messages_an_assistant_turn_that_only_calls(client: Client, ordinary: None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns: list[Json] = [{"content": None}, {}, {"content": ""}, {"content": []}]
    seen = set()
    for turn in turns:
        messages = [
            {"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]} | turn,
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]  # fmt: skip
        _, tokens = await client.post("/tokenize", json={"messages": messages})
        _, text = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        seen.add(text["prompt"])
        (await client.ask({"messages": messages, "max_tokens": 3, "temperature": 0})).check()
    assert len(seen) == 1 and '"name": "f"' in seen.pop()
    for message, param in (
        ({"content": "x"}, "messages[1].role"), ({"role": "user", "content": 7}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"), ({"role": "nobody", "content": "x"}, "messages[1].role"),
    ):  # fmt: skip
        body = {"messages": [{"role": "user", "content": "x"}, message]}
        await refused(client, "/v1/chat/completions", body, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"messages":[{"role":"user","content":"x \\ud83d y"}]', "messages[0].content"),
        (b'"messages":[{"role":"user","content":"x"}],"stop":"\\ud83d"', "stop"),
        (b'"messages":[{"role":"user","content":"x"}],"user":"\\udc00"', "user"),
        (b'"messages":[{"role":"user","content":"x"}],"cache_salt":"\\udc00\\ud83d"', "cache_salt"),
        (b'"messages":[{"role":"user","content":"x","name":"\\ud83d"}]', "messages[0].name"),
        (
            b'"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"\\ud83d"}}]',
            "tools[0].function.name",
        ),
    ],
)
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_wire_encoding_an_unpaired_surrogate(
    client: Client, shared_stack: Stack, fields: bytes, param: str, stream: bytes, ordinary: None
) -> None:
    await refused(client, "/v1/chat/completions", b"{" + fields + b',"stream":' + stream + b"}", param)
    paired = b'{"prompt":"x \\ud83e\\udd8a y","max_tokens":2,"stream":' + stream + b"}"
    async with client.session.post(client.url + "/v1/completions", data=paired) as response:
        assert response.status == 200
    assert shared_stack.process("gateway").log.read_bytes().decode("utf-8", "strict")


async def test_token_budget_no_tokens_at_all(client: Client, ordinary: None) -> None:
    for extra in ({"echo": True}, {}):
        answer = await client.ask({"prompt": "score this text", "max_tokens": 0} | extra)
        answer.check()
        assert answer.text == ("score this text" if extra else "") and answer.choices[0].finish_reason == "length"
        assert answer.usage and answer.usage["completion_tokens"] == 0
    scored = await client.ask({"prompt": "score this text", "max_tokens": 0, "echo": True, "logprobs": 1})
    assert (scored.text, scored.choices[0].finish_reason) == ("score this text", "length")
    assert scored.usage and len(scored.choices[0].tokens) == scored.usage["prompt_tokens"]
    assert [token[1] is None for token in scored.choices[0].tokens] == [True, *[False] * len("score this text")]
    (await client.ask({"prompt": "x", "max_tokens": 1.0})).check()
    (await client.ask({"prompt": "x", "max_tokens": None})).check()
    await refused(client, "/v1/completions", {"prompt": "x", "max_tokens": -1}, "max_tokens")
    await refused(client, "/v1/completions", {"prompt": [65] * 2048, "max_tokens": 1}, "prompt")
    (await client.ask({"prompt": [65] * 2048, "max_tokens": 0})).check()
    (await client.ask({"prompt": [65] * 2047, "max_tokens": 1})).check()


ENDINGS: dict[str, tuple[str, Json, str]] = {  # what is asked, and how the answer ends
    "eos": ("<script>some words", {}, "stop"),
    "stop": ("<script>some words", {"stop": ["rd"]}, "stop"),
    "length": ("goes on", {}, "length"),
    "tool": ('<script>{"name": "f", "arguments": {"a": 1}}', {"tools": [FUNCTION]}, "tool_calls"),
}


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize(
    ("api", "ending"),
    [*(("chat", ending) for ending in ENDINGS), *(("completions", ending) for ending in ("eos", "stop", "length"))],
)
@pytest.mark.parametrize("with_usage", [True, False])
async def test_stream_protocol_a_stream_ends_once(
    client: Client, num_choices: int, api: str, ending: str, with_usage: bool
) -> None:
    text, fields, reason = ENDINGS[ending]
    body = (chat if api == "chat" else plain)(
        f"ends {text}", 20 if ending == "length" else 60, n=num_choices, **fields, **(USAGE if with_usage else {})
    )
    async with client.session.post(
        client.url + ("/v1/chat/completions" if api == "chat" else "/v1/completions"), json=body
    ) as response:
        events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = [json.loads(event) for event in events[:-1]]
    if with_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] >= num_choices
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == list(range(num_choices))
    reasons = {c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    assert reasons == {reason}


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([-1], "prompt[0]"), ([vocab.VOCAB_SIZE], "prompt[0]"), ([1, 2, 1e10], "prompt[2]"), ([True], "prompt[0]"),
     ([1.5], "prompt[0]"), ([[1, 2], [3, -1]], "prompt[1][1]"), ([1, None], "prompt[1]"), ([1 << 63], "prompt[0]")],
)  # fmt: skip
async def test_degenerate_prompts_ids_that_are_none(client: Client, prompt: Any, param: str, ordinary: None) -> None:
    await refused(client, "/v1/completions", {"prompt": prompt}, param)


async def test_templating_and_tokenising_one_bos(client: Client, ordinary: None) -> None:
    _, in_chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]})
    _, plain_text = await client.post("/tokenize", json={"prompt": "hello"})
    _, with_bos = await client.post("/tokenize", json={"prompt": BOS + "hello"})
    assert in_chat["tokens"] == plain_text["tokens"] == with_bos["tokens"] == prompt_ids("hello")
    long = "the same prompt in both endpoints, longer than a block of the pool"
    await client.ask(plain(long, 2))
    answer = await client.ask(chat(long, 2, stream=False))
    assert answer.usage and answer.usage["prompt_tokens"] == len(prompt_ids(long))
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= 48


def strictly(body: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(body, parse_constant=refuse)


@pytest.mark.parametrize("stream", [True, False])
async def test_non_finite_numbers_are_never_sent(client: Client, stream: bool, ordinary: None) -> None:
    """Filters and biases that leave next to nothing to choose from."""
    banned = {str(i): -100 for i in range(vocab.VOCAB_SIZE) if i not in (65, 66)}
    narrow: Json = {"temperature": 1, "seed": 1, "top_k": 1, "stream": stream}
    for path, body in (
        ("/v1/completions", plain("four plain words here", 2, logprobs=5, **narrow)),
        ("/v1/completions", plain("four plain words here", 1, logprobs=1, echo=True, **narrow)),
        ("/v1/chat/completions", chat("x", 2, logprobs=True, top_logprobs=5, logit_bias=banned, **narrow)),
    ):
        async with client.session.post(client.url + path, json=body) as response:
            text = await response.text()
        assert response.status == 200, text
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        assert events and all(strictly(event)["choices"] for event in events)


@pytest.mark.parametrize(
    ("key", "value"),
    [("999999999", 5), ("-1", 5), ("abc", 5), ("1.5", 5), ("1", "x"), ("1", 1000), (str(vocab.VOCAB_SIZE), 5)],
)
async def test_token_id_validation_a_bias_on_what_is_no_token(
    client: Client, key: str, value: Any, ordinary: None
) -> None:
    for body, path in ((chat("x", 2), "/v1/chat/completions"), (plain("x", 2), "/v1/completions")):
        await refused(client, path, body | {"logit_bias": {key: value}}, f"logit_bias.{key}")


async def test_token_id_validation_too_many_biases(client: Client, ordinary: None) -> None:
    await refused(
        client, "/v1/completions", plain("x", 2, logit_bias={str(i): 0 for i in range(100_000)}), "logit_bias"
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_over_several_tokens(client: Client, stream: bool, ordinary: None) -> None:
    extra = USAGE if stream else {}
    script = plain("x<script>a b c d e f g", 64, stop=["zz", "b c d"], stream=stream, **extra)
    answer = await client.ask(script)
    answer.check()
    assert (answer.text, answer.choices[0].finish_reason) == ("a ", "stop")
    assert answer.usage and answer.usage["completion_tokens"] == len("a b c d")
    both = await client.ask(plain("x<script>abcdef", 64, stop=["d", "bcd"], stream=stream, **extra))
    assert both.text == "a", "of two that end in the same token the one that begins first"
