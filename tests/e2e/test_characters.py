"""Characters of several tokens: cut in every place by the end of an answer, and by the death of the worker."""

from __future__ import annotations

import functools

import pytest

from shared import scripted_vocab as vocab
from tests.e2e.clients import Answer, Client, Connect
from tests.e2e.load import USAGE, prompt_ids, verbatim
from tests.e2e.stack import NewStack, Stack
from tests.figures import note
from tests.helpers import wait_until


@pytest.mark.parametrize("character", ["é", "漢", "🦊"])
async def test_utf8_stream_an_answer_that_ends_inside_a_character(client: Client, character: str) -> None:
    num_bytes = len(character.encode())
    for k in range(1, num_bytes + 1):
        for stream in (True, False):
            body = verbatim("ab" + character, f"cut {character}", stream=stream) | {"max_tokens": 2 + k}
            answer = await client.ask(body | (USAGE if stream else {}))
            answer.check()
            assert answer.text == "ab" + (character if k == num_bytes else "\ufffd")
            assert answer.usage and answer.usage["completion_tokens"] == 2 + k
            assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xf0\x9f\xa6b", "a\ufffdb"),  # an incomplete character, then a whole one
        (b"a\xff\xfeb", "a\ufffd\ufffdb"),
        (b"\xed\xa0\xbd", "\ufffd\ufffd\ufffd"),  # a surrogate
        (b"\xc0\xaf", "\ufffd\ufffd"),  # a slash, written too long
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),  # past the last character
    ],
)
async def test_bytes_that_are_no_text(client: Client, data: bytes, text: str) -> None:
    for stream in (True, False):
        prompt = [*prompt_ids("no text"), vocab.SCRIPT, *data]
        answer = await client.ask({"prompt": prompt, "max_tokens": 50, "temperature": 0, "stream": stream})
        answer.check()
        assert answer.text == text == data.decode("utf-8", "replace")


@pytest.mark.parametrize("inside", [1, 2, 3])
async def test_a_worker_killed_inside_a_character(new_stack: NewStack, connect: Connect, inside: int) -> None:
    """Killed when the durable log ends after so many bytes of a character; the other worker goes on with the rest."""
    text = "🦊🙂🙃🧿" * 12
    env = {"scripted_step_ms": 12}
    async with new_stack(workers=2, env=env) as stack:
        client = connect(stack.url)
        async with stack.supervised():
            answering = client.begin(verbatim(text, **USAGE))
            await wait_until(functools.partial(is_inside, stack, inside), every=0.002)
            [seq] = stack.state.running()
            killed_at = stack.kill(stack.by_incarnation(seq.worker))
            answer: Answer = await answering
        note(pause_s=answer.longest_pause_s(killed_at))
        answer.check()
        assert answer.text == text and "\ufffd" not in answer.text
        assert answer.usage and answer.usage["completion_tokens"] == len(text.encode()) + 1
        [log] = [stack.state.log(s.sid) for s in stack.state.sequences() if s.num_tokens > 1]
        assert bytes(log[:-1]).decode() == text


def is_inside(stack: Stack, inside: int) -> bool:
    return any(seq.num_tokens > 8 and seq.num_tokens % 4 == inside for seq in stack.state.running())
