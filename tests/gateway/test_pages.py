"""The routes that generate nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.fleet import Fleet
from shared import metrics
from shared.protocol import Member
from shared.scripted_vocab import BOS
from tests.gateway.conftest import MODEL, Gateway, Served
from tests.gateway.fake_worker import FakeWorker
from tests.helpers import wait_until

Serve = Callable[..., Awaitable[Served]]


async def test_models(served: Served) -> None:
    _, answer, _ = await served.get("/v1/models")
    [model] = answer["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 1024)
    _, one, _ = await served.get(f"/v1/models/{MODEL}")
    assert one == model


async def test_tokens_there_and_back(served: Served) -> None:
    _, answer, _ = await served.post("/tokenize", {"prompt": "hi!", "return_token_strs": True})
    assert answer == {
        "count": 4, "max_model_len": 1024, "tokens": [BOS, *b"hi!"], "token_strs": ["<bos>", "h", "i", "!"]
    }  # fmt: skip
    _, answer, _ = await served.post("/tokenize", {"messages": [{"role": "user", "content": "x" * 5000}]})
    assert answer["count"] == 5001
    _, answer, _ = await served.post("/detokenize", {"tokens": list("grün".encode())})
    assert answer == {"prompt": "grün"}
    status, answer, _ = await served.post("/detokenize", {"tokens": [7, -1]})
    assert (status, answer["error"]["param"]) == (400, "tokens[1]")


async def test_version_names_what_answers(served: Served) -> None:
    _, answer, _ = await served.get("/version")
    assert answer["model"] == MODEL
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["alive"] == {"gateway": 1, "scheduler": 0, "store": 0, "worker": 1}
    assert answer["workers"][0]["variant"] == "test-variant"


async def test_people_see_a_page_and_programs_json(serve_with: Serve) -> None:
    served = await serve_with(api_keys=("k",))
    bearer = {"Authorization": "Bearer k"}
    _, answer, _ = await served.get("/", headers=bearer)
    assert (answer["model"], answer["status"]) == (MODEL, "ready")
    async with served.session.get(served.url + "/", headers=bearer | {"Accept": "text/html,*/*"}) as response:
        page = await response.text()
        assert response.content_type == "text/html"
    assert "curl -N http://127.0.0.1" in page
    assert "YOUR_KEY" in page
    assert "$" not in page
    for link in answer["links"]:
        async with served.session.get(served.url + link, headers=bearer) as response:
            assert response.status == 200


async def test_one_scrape_shows_every_service(served: Served, answering: Callable[..., None]) -> None:
    answering(lambda request, choice: list(b"abc"))
    await served.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    await served.post("/v1/completions", {"prompt": 7})
    registry = CollectorRegistry()
    Counter("headrace_steps", "Steps", registry=registry).inc(5)
    worker = served.worker
    await metrics.publish(worker.redis, worker.scripts.prefix, "worker", worker.name, registry)
    async with served.session.get(served.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    samples = {
        (s.name, s.labels.get("service"), s.labels.get("status", "")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples["headrace_steps_total", "worker", ""] == 5
    assert samples["headrace_generation_tokens_total", "gateway", ""] == 3
    assert samples["headrace_prompt_tokens_total", "gateway", ""] == 2
    assert samples["headrace_http_requests_total", "gateway", "200"] == 1
    assert samples["headrace_http_requests_total", "gateway", "400"] == 1
    assert samples["headrace_time_to_first_token_seconds_count", "gateway", ""] == 1
    assert samples["headrace_inter_token_latency_seconds_count", "gateway", ""] >= 1
    assert samples["headrace_process_cpu_seconds_total", "gateway", ""] > 0


@pytest.mark.parametrize(
    ("allowed", "origin", "answer"),
    [((), "http://a", None), (("http://a",), "http://a", "http://a"), (("http://a",), "http://b", None),
     (("*",), "http://b", "*")],
)  # fmt: skip
async def test_other_origins_may_call_only_where_that_is_set(
    serve_with: Serve, allowed: tuple[str, ...], origin: str, answer: str | None
) -> None:
    served = await serve_with(cors_origins=allowed, api_keys=("k",))
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    async with served.session.options(served.url + "/v1/completions", headers=asks) as response:
        assert response.headers.get("Access-Control-Allow-Origin") == answer
        assert response.status == (204 if answer else 401)
    async with served.session.get(served.url + "/v1/models", headers={"Origin": origin}) as response:
        assert response.status == 401
        assert response.headers.get("Access-Control-Allow-Origin") == answer


async def test_limits_are_those_of_the_roomiest_worker(gateway: Gateway, worker: FakeWorker) -> None:
    other = Member(
        kind="worker",
        incarnation="w-2",
        variant="other",
        max_model_len=64,
        num_blocks=1000,
        block_size=16,
        vocab_size=9,
    )
    fleet = Fleet(gateway.redis, gateway.records, gateway.scripts.prefix, lambda: 0.0)  # no look is ever due
    await fleet.turn()
    alone = fleet.fingerprint()
    await gateway.scripts.join(other, 60_000, [])
    await wait_until(lambda: two_workers(fleet))
    limits = fleet.limits(3)
    assert (limits.max_model_len, limits.pool_tokens, limits.max_choices) == (1024, 16_000, 3)
    assert fleet.fingerprint() != alone
    await gateway.redis.delete(gateway.scripts.key("lease:worker:w-2"))
    await fleet.look()
    assert fleet.fingerprint() == alone


async def two_workers(fleet: Fleet) -> bool:
    await fleet.turn()
    return len(fleet.workers) == 2


async def test_readiness_grows_stale_with_redis(gateway: Gateway, worker: FakeWorker) -> None:
    now = 0.0
    fleet = Fleet(gateway.redis, gateway.records, gateway.scripts.prefix, lambda: now)
    assert not fleet.is_ready()
    await fleet.look()
    assert fleet.is_ready()
    now = 11.0
    assert not fleet.is_ready()
