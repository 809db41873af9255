"""Clients come back: to a gateway that lives when theirs was killed, and to requests that went on without them."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from typing import Any

from services.tools.client import StreamClient
from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import NUM_TOKENS, SLOW, USAGE, Json, mixed, plain, words
from tests.e2e.stack import NewStack
from tests.figures import note
from tests.helpers import wait_until

NEVER_ENDING = 2000  # tokens, 40 s
MAX_PAUSE_S = 2.0


def by_choice(lines: Sequence[str]) -> dict[Any, list[str]]:
    """Events as they were sent, of each choice and of none."""
    found: dict[Any, list[str]] = {}
    for line in lines:
        choices = json.loads(line)["choices"] if line != "[DONE]" else []
        found.setdefault(choices[0]["index"] if choices else None, []).append(line)
    return found


async def test_all_clients_of_a_killed_gateway_go_on_at_the_other(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    """20 streams; what each client has in the end is what any gateway sends from the beginning, byte for byte."""
    async with new_stack(gateways=2, workers=2, env=SLOW) as stack:
        victim = stack.process("gateway", 0)
        bodies = [body for body in mixed("load") if body["stream"]]
        more = [plain(f"more {i}", 2 * NUM_TOKENS, temperature=1, seed=i, **USAGE) for i in range(20 - len(bodies))]
        first, other = connect(stack.url_of(0)), connect(stack.url_of(1))
        begun: dict[int, Answer] = {}
        asking = [first.begin(body, lambda a: begun.update({id(a): a})) for body in bodies + more]
        assert len(asking) == 20
        await wait_until(lambda: len(begun) == 20)
        killed_at = stack.kill(victim)
        answers = [await answer for answer in asking]
        taken_up = [a for a in answers if not a.done]
        assert len(taken_up) > 15 and all(a.broken and a.error is None for a in taken_up)
        await asyncio.gather(*(other.take_up(a) for a in taken_up))
        streamed = [a for a in undisturbed if a.body["stream"]]
        check_same(answers[: len(bodies)], streamed)
        for i, answer in enumerate(answers[len(bodies) :]):
            answer.check()
            assert answer.text == words(f"more {i}", 2 * NUM_TOKENS, seed=i)
        for answer in answers:
            again = await other.take_up(Answer(answer.body, headers=answer.headers, broken="for the test"))
            assert by_choice(again.lines) == by_choice(answer.lines)
        pause = longest_pause_s(taken_up, killed_at)
        note(pause_s=pause)
        assert pause < MAX_PAUSE_S


async def test_the_products_client_and_repeated_calls_outlive_gateways(new_stack: NewStack, connect: Connect) -> None:
    """One gateway is killed after the other."""
    async with new_stack(gateways=3, env=SLOW) as stack:
        urls = [stack.url_of(i) for i in range(3)]
        key = {"Idempotency-Key": "a whole answer"}
        whole = connect(stack.url_of(0)).begin(plain("whole", 4 * NUM_TOKENS, stream=False), headers=key)
        texts = [""] * 4

        async def read(i: int) -> None:
            async with StreamClient(urls) as client:
                async for chunk in client.stream("/v1/completions", plain(f"read {i}", 4 * NUM_TOKENS)):
                    texts[i] += chunk["choices"][0]["text"]

        reading = [asyncio.ensure_future(read(i)) for i in range(4)]
        await wait_until(lambda: all(texts))
        for index in (0, 1):
            lengths = [len(text) for text in texts]
            stack.kill(stack.process("gateway", index))
            assert (await whole).broken
            whole = connect(urls[index + 1]).begin(plain("whole", 4 * NUM_TOKENS, stream=False), headers=key)
            await wait_until(lambda lengths=lengths: all(len(t) > n for t, n in zip(texts, lengths, strict=True)))
        await asyncio.gather(*reading)
        assert texts == [words(f"read {i}", 4 * NUM_TOKENS) for i in range(4)]
        answer = await whole
        answer.check()
        assert answer.text == words("whole", 4 * NUM_TOKENS)
        assert len([s for s in stack.state.sequences() if s.num_tokens > 1]) == 5, "something was generated twice"


async def test_two_equal_calls_at_two_gateways_are_one(new_stack: NewStack, connect: Connect) -> None:
    async with new_stack(gateways=2, env=SLOW) as stack:
        clients = [connect(stack.url_of(i)) for i in (0, 1)]
        key = {"Idempotency-Key": "both"}
        body = plain("equal", n=2, temperature=1, seed=5, **USAGE)
        bodies: list[Json] = [body, plain("equal, whole", stream=False)]
        for number, each in enumerate(bodies):
            headers = {"Idempotency-Key": f"both {number}"}
            one, two = await asyncio.gather(*(client.ask(each, headers=headers) for client in clients))
            one.check()
            two.check()
            assert one.essence() == two.essence() and one.id == two.id and one.usage == two.usage
            assert by_choice(one.lines) == by_choice(two.lines)
        assert len([s for s in stack.state.sequences() if s.num_tokens > 1]) == 3
        await clients[0].ask(body, headers=key)
        other = await clients[1].ask(body | {"seed": 6}, headers=key)
        assert other.status == 422


async def test_how_long_a_request_goes_on_without_its_client(new_stack: NewStack, connect: Connect) -> None:
    """Not at all; as long as it was told; and a gateway that stops gives its clients the grace time."""
    async with new_stack(gateways=2, env=SLOW | {"drain_timeout_s": 0.1, "max_model_len": 4000}) as stack:
        leaving = [
            connect(stack.url_of(0)).begin(plain(f"leaves {i}", NEVER_ENDING), headers={"X-Headrace-Resume": s})
            for i, s in enumerate(("0", "3", "60"))
        ]
        await wait_until(lambda: sum(s.num_tokens > 2 for s in stack.state.running()) == 3)
        for task in leaving:
            task.cancel()
        left_at = time.perf_counter()
        ended_after = {}
        while len(ended_after) < 2:
            await asyncio.sleep(0.02)
            done = [s for s in stack.state.sequences() if s.state == "done" and s.num_tokens > 1]
            ended_after |= {s.sid: time.perf_counter() - left_at for s in done if s.sid not in ended_after}
        at_once, in_time = ended_after.values()
        assert at_once < 1 and 2.5 < in_time < 7, ended_after
        [goes_on] = stack.state.running()
        assert goes_on.gateway == ""
        stopping = connect(stack.url_of(0)).begin(plain("stopped", NEVER_ENDING))
        await wait_until(lambda: any(s.num_tokens > 2 for s in stack.state.running() if s.gateway))
        stack.kill(stack.process("gateway", 0), signal.SIGTERM)
        broken = await stopping
        assert not broken.done and broken.error is None
        other = connect(stack.url_of(1))
        coming_back = asyncio.ensure_future(other.take_up(broken))
        at_other = stack.process("gateway", 1).incarnation
        await wait_until(lambda: any(s.gateway == at_other for s in stack.state.running()))
        coming_back.cancel()
        async with other.session.delete(f"{other.url}/v1/streams/{goes_on.sid.partition('.')[0]}") as response:
            assert response.status == 200
        await wait_until(lambda: not stack.state.running())


async def test_what_has_expired_is_gone(new_stack: NewStack, connect: Connect) -> None:
    async with new_stack(env={"retention_s": 1}) as stack:
        client = connect(stack.url)
        answer = await client.ask(plain("kept for a second"))
        answer.check()
        assert (await client.take_up(Answer(answer.body, headers=answer.headers))).text == answer.text
        await wait_until(lambda: not stack.state.sequences())
        gone = await client.take_up(Answer(answer.body, headers=answer.headers))
        assert (gone.status, (gone.error or {})["code"]) == (410, "stream_expired")
