"""Log-probabilities of prompts through the whole stack: as harnesses that score models ask for them, streamed and not,
taken up half way, and when workers die on the way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from shared import scripted_vocab as vocab
from tests.e2e.clients import Client, Connect
from tests.e2e.load import Json
from tests.e2e.stack import NewStack
from tests.helpers import wait_until

IDS = [1 + (7 * i) % 250 for i in range(300)]
SLOW = {"scripted_token_ms": 4, "max_model_len": 4096}


def told(ids: list[int]) -> list[float | None]:
    """What the scripted engine says of each."""
    return [None, *(-0.25 * vocab.rank(ids[: i + 1]) for i in range(1, len(ids)))]


def scoring(prompt: Any, **fields: Any) -> Json:
    """As lm-eval's local-completions asks."""
    return {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234} | fields


async def ask(client: Client, body: Json) -> Json:
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        value: Json = await response.json()
        return value


async def stream(client: Client, body: Json, rid: str = "", after: str = "") -> list[tuple[str, Json]]:
    """Events with their ids, from the beginning or of a call that is taken up."""
    url, headers = f"{client.url}/v1/streams/{rid}", {"Last-Event-ID": after} if after else {}
    if not rid:
        asking = client.session.post(f"{client.url}/v1/completions", json=body | {"stream": True})
    else:
        asking = client.session.get(url, headers=headers)
    async with asking as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    events = [dict(line.split(": ", 1) for line in e.split("\n")) for e in text.split("\n\n") if e[:2] == "id"]
    return [(e["id"], json.loads(e["data"])) for e in events if e["data"] != "[DONE]"]


def joined(events: list[tuple[str, Json]]) -> dict[int, Json]:
    """The choices that the events make."""
    choices: dict[int, Json] = {}
    for _, data in events:
        for part in data["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": {}, "finish_reason": None})
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return choices


async def test_a_harness_scores_several_prompts(client: Client) -> None:
    prompts = [IDS[:20], IDS[5:70], IDS[:1]]
    for max_tokens in (1, 0):
        answer = await ask(client, scoring(prompts, max_tokens=max_tokens))
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == 3 * max_tokens
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice, ids in zip(answer["choices"], prompts, strict=True):
            logprobs = choice["logprobs"]
            assert logprobs["token_logprobs"][: len(ids)] == told(ids)
            assert {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}
            for logprob, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:
                assert max(top.values()) == -0.25 or logprob == max(top.values())
            assert choice["finish_reason"] == "length"


async def test_a_prompt_that_fills_the_context_is_scored(client: Client) -> None:
    """Where a token is to follow it, or with one more of its own, it does not fit."""
    ids = [1 + (13 * i) % 250 for i in range(2049)]
    for body in (scoring(ids[:2048], max_tokens=0), scoring(ids[:2048], max_tokens=0, logprobs=0, prompt_logprobs=0)):
        answer = await ask(client, body)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == told(ids[:2048])
        assert answer["usage"]["completion_tokens"] == 0 and answer["choices"][0]["finish_reason"] == "length"
    assert joined(await stream(client, scoring(ids[:2048], max_tokens=0)))[0]["logprobs"]["token_logprobs"] == told(
        ids[:2048]
    )
    for body in (scoring(ids[:2048]), scoring(ids, max_tokens=0)):
        async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"


async def test_a_prompt_in_the_cache_is_computed_again(client: Client) -> None:
    ids = [3 + i % 200 for i in range(100)]
    body: Json = {"prompt": ids, "max_tokens": 1, "temperature": 0}
    await ask(client, body)
    cached = (await ask(client, body))["usage"]["prompt_tokens_details"]["cached_tokens"]
    scored = await ask(client, scoring(ids))
    assert cached > 0 and scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert scored["choices"][0]["logprobs"]["token_logprobs"][:100] == told(ids)
    assert (await ask(client, body))["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_streamed_it_is_the_same_and_every_event_is_a_place_to_come_back_to(client: Client) -> None:
    body = scoring([IDS, IDS[:9]], max_tokens=4, n=2, temperature=1.0)
    whole = {c.pop("index"): c for c in (await ask(client, body))["choices"]}
    events = await stream(client, body)
    assert joined(events) == whole and len(events) > 6
    rid = events[0][0].partition(":")[0]
    for number in range(0, len(events), 2):
        rest = await stream(client, body, rid, events[number][0])
        assert joined(events[: number + 1] + rest) == whole, events[number]


async def test_prompt_logprobs_by_name(client: Client) -> None:
    body: Json = {"prompt": IDS[:12], "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    [choice] = (await ask(client, body))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None and len(others) == 11
    for i, entry in enumerate(others, 1):
        own, rank = entry[str(IDS[i])], vocab.rank(IDS[: i + 1])
        assert own["rank"] == rank and own["logprob"] == -0.25 * rank
        assert sorted(e["rank"] for e in entry.values()) == ([1, 2] if rank < 3 else [1, 2, rank])
    chat: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 0}
    async with client.session.post(f"{client.url}/v1/chat/completions", json=chat) as response:
        answer = await response.json()
    assert [len(e) for e in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)


async def test_a_worker_that_dies_on_the_way_is_not_noticed(new_stack: NewStack, connect: Connect) -> None:
    """What has been told of the prompt stays; the rest and the answer come from another worker."""
    ids = [1 + (11 * i) % 250 for i in range(900)]
    bodies = [scoring(ids, max_tokens=6, prompt_logprobs=None), scoring(ids[1:], max_tokens=0), scoring(ids, n=2)]
    async with new_stack(workers=2, env=SLOW) as stack:
        client = connect(stack.url)
        undisturbed = [{c.pop("index"): c for c in (await ask(client, body))["choices"]} for body in bodies]
        asking = [asyncio.ensure_future(stream(client, body)) for body in bodies]
        await wait_until(lambda: any(-850 < s.num_tokens < -100 for s in stack.state.running()))
        [victim, *_] = [s.worker for s in stack.state.running() if -850 < s.num_tokens < -100]
        process = stack.by_incarnation(victim)
        stack.kill(process)
        await stack.report(process)
        await stack.restart(process)
        assert [joined(await events) for events in asking] == undisturbed
    assert undisturbed[0][0]["logprobs"]["token_logprobs"][:900] == told(ids)
