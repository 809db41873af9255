"""`headrace bench --compare`: turns, ratios round by round, and servers that fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from services.tools import bench
from services.tools.bench_compare import RATIOS, NoServer, Server, compare, report, served_model, table
from services.tools.bench_load import Load
from services.tools.bench_stats import Run, Sample, spread, summary

A, B, C = "http://a", "http://b", "http://c"
MODEL = web.AppKey("model", str)
LOAD = Load(url="", num_requests=2, seed=40)


def run_of(seconds: float, failed: int = 0) -> Run:
    samples = [Sample(seconds / 10, seconds, [seconds / 100], 100, 64, cached) for cached in (0, 90, 80)]
    return Run(samples, Counter({"HTTP 500": failed} if failed else {}), seconds)


class Fakes:
    """Servers that take as long as they are told, round by round; a number of failures instead of a time fails."""

    def __init__(self, times: dict[str, list[float | Counter[str]]]) -> None:
        self.times = {url: list(values) for url, values in times.items()}
        self.loads: list[Load] = []
        self.rests: list[int] = []  # turns before each

    async def rest(self) -> None:
        self.rests.append(len(self.loads))

    async def run(self, load: Load) -> Run:
        if load.max_tokens == (4,):  # the greeting
            return run_of(1.0)
        self.loads.append(load)
        value = self.times[load.url].pop(0)
        return Run([], value, 1.0) if isinstance(value, Counter) else run_of(value)


async def no_rest() -> None:
    pass


async def test_every_turn_waits_until_the_servers_before_have_come_to_rest() -> None:
    """Those that were greeted too."""
    fakes = Fakes({A: [1, 1], B: [1, 1]})
    await compare([A, B], ["m"], LOAD, 2, lambda line: None, fakes.run, fakes.rest)
    assert fakes.rests == [0, 1, 2, 3]


async def test_servers_take_turns_with_the_same_prompts() -> None:
    fakes = Fakes({A: [1, 1, 1], B: [1, 1, 1]})
    await compare([A, B], ["x", "y"], LOAD, 3, lambda line: None, fakes.run, fakes.rest)
    assert [(load.url, load.model, load.seed) for load in fakes.loads] == [
        (A, "x", 40), (B, "y", 40), (B, "y", 41), (A, "x", 41), (A, "x", 42), (B, "y", 42),
    ]  # fmt: skip


async def test_ratios_are_of_the_same_round() -> None:
    fakes = Fakes({A: [1, 2, 4], B: [2, 8, 8]})
    result = await compare([A, B], ["m"], LOAD, 3, lambda line: None, fakes.run, fakes.rest)
    [ratio] = result["ratios"]
    assert (ratio["first"], ratio["other"]) == (A, B)
    assert ratio["output_tok_s"] == {"median": 2.0, "min": 2.0, "max": 4.0}  # twice, four times and twice as fast
    assert ratio["ttft_ms.p50"] == {"median": 0.5, "min": 0.25, "max": 0.5}
    assert result["servers"][1]["output_tok_s"] == {"median": 24.0, "min": 24.0, "max": 96.0}
    assert result["failed"] == []
    assert "2 (2-4)" in table(result) and "output tok/s" in table(result)


async def test_a_round_that_fails_is_named_and_counts_for_nobody() -> None:
    fakes = Fakes({A: [1, 1, 1], B: [2, Counter({"HTTP 500": 2}), 4]})
    said: list[str] = []
    result = await compare([A, B], ["m"], LOAD, 3, said.append, fakes.run, fakes.rest)
    sentence = "http://b, round 2: 2 of 2 requests failed (HTTP 500: 2)"
    assert result["servers"][1]["errors"] == [sentence] and sentence in said
    assert result["servers"][1]["rounds"] == 2 and result["failed"] == [B]
    assert result["ratios"][0]["output_tok_s"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert sentence in table(result)


def test_without_a_whole_round_there_is_no_figure() -> None:
    good, bad = Server(A, "m", [summary(run_of(1.0))]), Server(B, "m", [None], ["http://b fails: HTTP 500: 1"])
    result = report([bad, good], 1)
    assert result["servers"][0]["output_tok_s"] is None
    assert all(result["ratios"][0][name] is None for name in RATIOS)
    assert result["failed"] == [B]
    assert "-" in table(result)


async def test_a_server_that_is_down_is_named_and_the_others_are_measured() -> None:
    down = f"http://127.0.0.1:{unused_port()}"
    fakes = Fakes({A: [1, 1], C: [2, 2]})
    result = await compare([A, down, C], ["m", "", "m"], LOAD, 2, lambda line: None, fakes.run, fakes.rest)
    assert result["failed"] == [down]
    [error] = result["servers"][1]["errors"]
    assert error.startswith(f"{down} does not answer: ")
    assert [ratio["output_tok_s"] and ratio["output_tok_s"]["median"] for ratio in result["ratios"]] == [None, 2.0]


def test_the_spread_of_what_was_measured() -> None:
    assert spread([3.0, None, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0}
    assert spread([None]) is None and spread([]) is None


def test_what_the_others_found_of_a_shared_prefix() -> None:
    assert summary(run_of(1.0))["cached_tokens_of_others"] == 80
    assert summary(Run())["cached_tokens_of_others"] == 0


async def stream(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["model"] != request.app[MODEL]:
        return web.json_response({"error": {"message": "no such model"}}, status=404)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
    usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
    await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": request.app[MODEL]}] if request.app[MODEL] else []})


@pytest.fixture
async def servers() -> AsyncIterator[list[TestServer]]:
    """Two that serve a model each, and one that serves none."""
    started = []
    for model in ("one", "two", ""):
        app = web.Application()
        app[MODEL] = model
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", stream)
        started.append(TestServer(app))
        await started[-1].start_server()
    yield started
    for server in started:
        await server.close()


async def test_models_are_asked_for(servers: list[TestServer]) -> None:
    urls = [str(server.make_url("/v1")) for server in servers]
    result = await compare(urls[:2], [""], LOAD, 1, lambda line: None, rest=no_rest)
    assert [server["model"] for server in result["servers"]] == ["one", "two"]
    assert result["failed"] == [] and result["ratios"][0]["output_tok_s"]["median"] > 0
    with pytest.raises(NoServer, match="names no model"):
        await served_model(urls[2].removesuffix("/v1"), {})


async def test_a_wrong_model_is_an_error_and_no_zero(servers: list[TestServer]) -> None:
    url = str(servers[0].make_url("")).rstrip("/")
    result = await compare([url], ["other"], LOAD, 1, lambda line: None, rest=no_rest)
    assert result["servers"][0]["errors"] == [f"{url} fails: HTTP 404: 1"]


def test_the_command_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    down = [f"http://127.0.0.1:{unused_port()}" for _ in range(2)]
    assert bench.main(["--compare", ",".join(down), "--rounds", "1"]) == 1
    printed, said = capsys.readouterr()
    assert json.loads(printed.splitlines()[-1])["failed"] == down
    assert all(f"{url} does not answer" in printed and f"{url} does not answer" in said for url in down)
    assert bench.main(["--compare", ",".join(down), "--rounds", "1", "--json"]) == 1
    printed, said = capsys.readouterr()
    assert len(printed.splitlines()) == 1 and said == ""


def test_options_may_have_the_names_of_vllm_s_benchmark() -> None:
    args = bench.parse(
        ["--base-url=http://h", "--max-concurrency=3", "--num-prompts=4", "--request-rate=2", "--random-input-len=5",
         "--random-output-len=6"]
    )  # fmt: skip
    load = bench.load_of(args, args.url, "m", 1)
    assert load == Load("http://h", 4, 3, 2.0, prompt_tokens=5, max_tokens=(6,), seed=1, model="m")


@pytest.mark.parametrize(
    "options",
    [["--compare", "a,b"], ["--compare", "http://a", "--rounds", "0"],
     ["--compare", "http://a,http://b", "--model", "x,y,z"]],
)  # fmt: skip
def test_impossible_comparisons_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(options)
