"""Rules of requests that ask for log-probabilities of their prompt: those come first in the log, below position 0."""

from __future__ import annotations

from shared.protocol import RequestSpec
from shared.scripts import CommitCode, KeyLimits
from tests.shared.rules_of_limits import header
from tests.shared.script_rules import RuleBook
from tests.shared.script_world import STOP, World, entry, spec_of

rules = RuleBook()


def scoring(rid: str = "r", num_choices: int = 1) -> RequestSpec:
    """Two tokens of the prompt have log-probabilities."""
    spec = spec_of(rid, num_choices)
    return spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"prompt_logprobs": 1})})


async def placed(w: World, num_choices: int = 1, limits: KeyLimits | None = None, **time_limits: int) -> None:
    await w.gateway()
    term = await w.worker()
    spec = scoring(num_choices=num_choices)
    if time_limits:
        spec = spec.model_copy(update={"time_limits": spec_of("r", **time_limits).time_limits})
    await w.scripts.admit(
        [(spec, b"\1\0\0\0" * 3)], gateway="g", owner="key", priority=0, max_requests=9, max_tokens=99,
        retention_ms=60_000, key_limits=limits or KeyLimits(),
    )  # fmt: skip
    for i in range(num_choices):
        assert await w.scripts.assign(f"r.{i}", 0, "w", term, b"admit") == "ok"


@rules.rule("its log begins with the prompt", "admit", "'num_tokens', log_start)", "'num_tokens', 0)")
async def _(w: World) -> None:
    await placed(w)
    assert (await w.sequence()).num_tokens == -2
    assert await w.commit(entry(first=0)) == [(CommitCode.FROM, -2)]
    assert await w.commit(entry(first=-2, count=2)) == [(CommitCode.APPENDED, 0)]
    assert await w.commit(entry(first=-2, count=2)) == [(CommitCode.HAVE, 0)]
    assert await w.commit(entry(first=0)) == [(CommitCode.APPENDED, 1)]


@rules.rule("tokens of its prompt are not its first one", "common", "tonumber(f[2]) <= 0 and d[3]", "d[3] and false")
async def _(w: World) -> None:
    await placed(w, first_token_ms=2000)
    await w.commit(entry(first=-2))
    await w.scripts.requeue("r.0", 1)
    assert (await header(w))[b"first_by"] not in (b"0", b"")


@rules.rule("what was not drawn is not counted as if it were", "common", "math.max(0, redis", "math.max(-9, redis")
async def _(w: World) -> None:
    await placed(w, 2, KeyLimits(tokens_per_minute=100))
    await w.commit(entry("r.0", first=-2, count=2))
    await w.commit(entry("r.0", first=0, count=30))
    for sid in ("r.0", "r.1"):
        await w.scripts.finish(sid, STOP)
    asked = await w.ask_admission("b", tokens=1, key_limits=KeyLimits(tokens_per_minute=100))
    assert asked.tokens_left == 100 - 3 - 30 - 1


@rules.rule("a retry scores its prompt anew", "retry", ", 'num_tokens', log_start)", ")")
async def _(w: World) -> None:
    await placed(w)
    await w.commit(entry(first=-2, count=2))
    assert await w.scripts.retry("r", scoring("q"), 2, 1000) == "ok"
    assert (await w.sequence("q.0")).num_tokens == -2
