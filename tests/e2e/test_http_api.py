"""The whole HTTP interface over a running stack: pages for people and machines, tokens, and both kinds of answers."""

from __future__ import annotations

import re

import aiohttp
import pytest

from shared import scripted_vocab as vocab
from tests.e2e.clients import Client
from tests.e2e.load import USAGE, chat, mixed, plain, prompt_ids, words
from tests.e2e.stack import Stack
from tests.helpers import wait_until


async def test_models(client: Client, shared_stack: Stack) -> None:
    status, listed = await client.get("/v1/models")
    assert status == 200 and [m["id"] for m in listed["data"]] == [shared_stack.served_name]
    assert listed["data"][0]["max_model_len"] == 2048
    status, error = await client.get("/v1/models/another")
    assert status == 404 and error["error"]["code"] == "model_not_found"


async def test_tokens_there_and_back(client: Client) -> None:
    text = "Grüße 🙂 <eos> 123"
    status, tokens = await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert status == 200 and tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["tokens"][0] == vocab.BOS and vocab.EOS in tokens["tokens"] and tokens["max_model_len"] == 2048
    status, back = await client.post("/detokenize", json={"tokens": tokens["tokens"][1:]})
    assert status == 200 and back["prompt"] == text
    _, as_chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    assert as_chat["tokens"] == prompt_ids("hi")


async def test_health_and_version(client: Client, shared_stack: Stack) -> None:
    assert await client.get("/health/live") == (200, {"status": "alive"})
    assert await client.get("/health/ready") == (200, {"status": "ready"})
    status, about = await client.get("/version")
    assert status == 200 and about["model"] == shared_stack.served_name
    assert about["alive"] == {"gateway": 1, "scheduler": 1, "store": 1, "worker": 2}
    assert [w["num_blocks"] for w in about["workers"]] == [512, 512] and about["system_fingerprint"]


async def test_a_prediction_changes_no_answer_and_usage_says_how_much_came_true(client: Client) -> None:
    plainly = await client.ask(chat("guess what", **USAGE))
    right = {"type": "content", "content": plainly.text}
    for prediction, more in ((right, {}), (right, {"speculative": {"num_speculative_tokens": 0}})):
        answer = await client.ask(chat("guess what", prediction=prediction, **USAGE, **more))
        assert answer.text == plainly.text and answer.usage and plainly.usage
        assert answer.usage["completion_tokens_details"] == {
            "reasoning_tokens": 0, "accepted_prediction_tokens": answer.usage["completion_tokens"],
            "rejected_prediction_tokens": 0,
        }  # fmt: skip
    wrong = await client.ask(chat("guess what", prediction={"type": "content", "content": "~~~"}, **USAGE))
    assert wrong.text == plainly.text and wrong.usage
    assert wrong.usage["completion_tokens_details"]["rejected_prediction_tokens"] == 3
    assert plainly.usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


async def test_metrics_show_every_service(client: Client) -> None:
    await client.ask(plain("to be counted"))

    async def metrics() -> str:
        """Empty until all services have published theirs."""
        async with client.session.get(client.url + "/metrics") as response:
            assert response.status == 200 and response.content_type == "text/plain"
            text = await response.text()
        return text if set(re.findall(r'service="(\w+)"', text)) == {"gateway", "scheduler", "store", "worker"} else ""

    text = await wait_until(metrics, every=0.1)
    shown = re.search(r"^headrace_generation_tokens_total\{[^}]*service=\"gateway\"[^}]*\} (\S+)", text, re.MULTILINE)
    assert shown and float(shown[1]) >= 48
    assert all(re.fullmatch(r"[a-z0-9_]+(\{.*\})? \S+", line) for line in text.splitlines() if not line.startswith("#"))


async def test_a_page_for_people(client: Client, shared_stack: Stack) -> None:
    async with client.session.get(client.url + "/", headers={"Accept": "text/html"}) as response:
        page = await response.text()
        assert response.status == 200 and response.content_type == "text/html"
    assert shared_stack.served_name in page and "curl" in page and "2 worker" in page
    status, short = await client.get("/")
    assert status == 200 and short["status"] == "ready"


@pytest.mark.parametrize("number", range(len(mixed("api"))))
async def test_streamed_or_not_is_the_same_answer(number: int, client: Client) -> None:
    body = mixed("api")[number]
    streamed = await client.ask(body | {"stream": True} | USAGE)
    whole = await client.ask({k: v for k, v in body.items() if k != "stream_options"} | {"stream": False})
    streamed.check()
    whole.check()
    assert streamed.essence() == whole.essence()
    assert streamed.usage and streamed.position == streamed.usage["completion_tokens"]


async def test_the_answers_are_what_the_engine_draws(client: Client, undisturbed: list) -> None:  # type: ignore[type-arg]
    """So that what other tests compare with cannot be wrong everywhere in the same way."""
    by_prompt = {str(a.body.get("prompt")): a for a in undisturbed}
    assert by_prompt["load plain"].text == words("load plain", 48)
    assert by_prompt["load longer"].text == words("load longer", 96)
    seeded = by_prompt["load seeded"].choices
    assert [seeded[i].text for i in range(3)] == [words("load seeded", 48, 7, i) for i in range(3)]
    assert by_prompt["load echo"].text == "load echo" + words("load echo", 48)
    full = words("load stops", 48)
    assert by_prompt["load stops"].text == full[: full.index(full[24:27])]
    assert by_prompt["load stops"].choices[0].finish_reason == "stop"
    (guessed,) = (a for a in undisturbed if "prediction" in a.body)
    assert guessed.text == words("load guessed", 48) and guessed.usage
    details = guessed.usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20 and details["rejected_prediction_tokens"] >= 5
    assert undisturbed[-1].text == "naïve — 日本語 🙂🙃 a̐éö̲ end"
    tokens = by_prompt["load log-probabilities"].choices[0].tokens
    assert [t[0] for t in tokens] == list(words("load log-probabilities", 48)) and all(len(t[2]) == 3 for t in tokens)


async def test_a_client_s_own_id_is_echoed_and_no_key(client: Client) -> None:
    answers = [await client.ask(chat("twice"), headers={"X-Request-Id": "mine\t1"}) for _ in range(2)]
    assert [a.headers["X-Request-Id"] for a in answers] == ["mine1", "mine1"]
    assert answers[0].id != answers[1].id and answers[0].text == answers[1].text


async def test_one_connection_serves_one_answer_after_another(shared_stack: Stack) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        for i in range(5):
            async with session.post(shared_stack.url + "/v1/completions", json=plain(f"{i}", 3)) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")
