"""Records that no gateway of ours writes: scheduler and worker check them again, and each ends as its own error."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
from redis.exceptions import ResponseError

from shared import scripted_vocab as vocab
from shared.bus import connect as connect_redis
from shared.protocol import RequestSpec, SamplingParams, TextParams
from shared.scripts import Scripts
from shared.wire import encode, pack_ids
from tests.e2e.clients import Answer, Client
from tests.e2e.stack import Stack
from tests.e2e.test_bad_input import neighbours
from tests.helpers import wait_until

Json = dict[str, Any]
PROMPT = pack_ids([vocab.BOS, 65, 66])
OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_tokens": [-1, 1 << 40, None, "x", 1.5],
    "min_tokens": [-1, 1 << 40],
    "temperature": [-1.0, float("nan"), float("inf"), 1e300, "x"],
    "top_p": [0.0, -1.0, 1.5, float("nan")],
    "top_k": [-1, 1 << 40],
    "min_p": [-0.1, 1.1, float("nan")],
    "seed": [-1, 1.5, "x"],
    "repetition_penalty": [0.0, -1.0, float("inf"), float("nan")],
    "frequency_penalty": [-3.0, float("nan"), 1e300],
    "presence_penalty": [3.0, float("nan")],
    "logit_bias": [{vocab.VOCAB_SIZE: 1.0}, {-1: 1.0}, {"x": 1.0}, {65: float("nan")}, {65: 1e300}, {65: float("-inf")},
                   dict.fromkeys(range(2000), 0.0), []],
    "stop_token_ids": [[vocab.VOCAB_SIZE], [-1], [1 << 31], list(range(200)), "x"],
    "logprobs": [-1, 21, 1 << 40],
}  # fmt: skip


class Forger(Scripts):
    """Admits what `forged` says instead of what it is asked to: number of prompt tokens, prompt, spec."""

    forged: tuple[int, bytes, bytes]

    async def _run(self, name: str, *args: Any) -> Any:
        return await super()._run(name, *args[:-4], *self.forged, args[-1])


@pytest.fixture
async def scripts(shared_stack: Stack) -> AsyncIterator[Forger]:
    redis = connect_redis(shared_stack.redis_url)
    yield Forger(redis, shared_stack.served_name)
    await redis.aclose()


def whole(rid: str, num_prompt_tokens: int = 3) -> RequestSpec:
    return RequestSpec(
        rid=rid, num_choices=1, num_prompt_tokens=num_prompt_tokens, salt=bytes(32),
        sampling=SamplingParams(max_tokens=8, seed=1), text=TextParams(api="completions"),
    )  # fmt: skip


def spec(rid: str, num_prompt_tokens: int = 3, **sampling: Any) -> bytes:
    """A spec as an older or a broken gateway may write it: what is not right is put into its message."""
    tag, fields = msgpack.unpackb(encode(whole(rid, num_prompt_tokens)), strict_map_key=False)
    return msgpack.packb([tag, fields | {"sampling": fields["sampling"] | sampling}])  # type: ignore[no-any-return]


class Records:
    def __init__(self, scripts: Forger, stack: Stack) -> None:
        self.scripts = scripts
        self.state = stack.state
        self.gateway = stack.state.alive("gateway")[0]

    async def admit(self, data: bytes, prompt: bytes = PROMPT, num_prompt_tokens: int = 3, rid: str = "") -> str:
        """The sequence that stands in the queue from now on."""
        rid = rid or secrets.token_hex(16)
        self.scripts.forged = (num_prompt_tokens, prompt, data)
        admission = await self.scripts.admit(
            [(whole(rid), PROMPT)], gateway=self.gateway, owner="", priority=0, max_requests=1 << 20,
            max_tokens=1 << 30, retention_ms=60_000,
        )  # fmt: skip
        assert admission.status == "ok"
        return f"{rid}.0"

    async def outcome(self, sid: str) -> tuple[str, str]:
        def done() -> bool:
            seq = self.state.sequence(sid)
            return seq is not None and seq.state == "done"

        await wait_until(done, 10)
        seq = self.state.sequence(sid)
        assert seq is not None and seq.outcome is not None and seq.strikes == 0, seq
        return seq.outcome.reason, seq.outcome.message


async def test_parameter_extremes_out_of_range(
    scripts: Forger, shared_stack: Stack, client: Client, undisturbed: list[Answer]
) -> None:
    records = Records(scripts, shared_stack)
    shared_stack.allowed.append("cannot be read")
    async with neighbours(client, undisturbed):
        waiting = {}
        for field, values in OUT_OF_RANGE.items():
            for value in values:
                rid = secrets.token_hex(16)
                waiting[await records.admit(spec(rid, **{field: value}), rid=rid)] = (field, str(value)[:40])
        for sid, what in waiting.items():
            reason, message = await records.outcome(sid)
            assert reason == "error" and message, (what, reason, message)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (pack_ids([vocab.BOS, vocab.VOCAB_SIZE, 65]), 3),
        (pack_ids([vocab.BOS, (1 << 32) - 1, 65]), 3),
        (b"", 0),
        (b"", 3),
        (PROMPT[:-1], 3),
        (pack_ids([65] * 500), 3),  # more than it says, hence more than it is given blocks for
        (PROMPT, 500),
        (pack_ids([65] * 3000), 3000),  # more than fits
        (pack_ids([65] * 3000), 3),
        (PROMPT, 1 << 40),
        (PROMPT, -5),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, bytes) else str(value),
)
async def test_degenerate_prompts_that_are_not_what_their_record_says(
    scripts: Forger, shared_stack: Stack, client: Client, undisturbed: list[Answer], prompt: bytes, said: int
) -> None:
    records = Records(scripts, shared_stack)
    async with neighbours(client, undisturbed):
        if len(prompt) != 4 * said or not said:
            with pytest.raises(ResponseError, match="not as long as is said"):
                await records.admit(spec("r", max(1, said)), prompt, said)
            return
        rid = secrets.token_hex(16)
        sid = await records.admit(spec(rid, said), prompt, said, rid)
        reason, message = await records.outcome(sid)
    assert reason == "error" and message, (reason, message)


async def test_a_record_that_changes_after_its_admission(
    scripts: Forger, shared_stack: Stack, client: Client, undisturbed: list[Answer]
) -> None:
    """The header says a length that the record, read later, does not have."""
    records = Records(scripts, shared_stack)
    shared_stack.allowed.append("cannot be read")
    async with neighbours(client, undisturbed):
        for said in (1, 3, 100):
            rid = secrets.token_hex(16)
            sid = await records.admit(spec(rid, 2), pack_ids([65] * said), said, rid)
            assert (await records.outcome(sid))[0] == "error"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00", b"\xff" * 100, msgpack.packb(["request", {}]), msgpack.packb(["chunk", [0, b"", None, "", 0]]),
        b"\x91" * 100_000, msgpack.packb([["request"], 1]), b"\x80\x04\x95.",
    ],
    ids=["empty", "zero", "noise", "no fields", "another message", "deep", "tag", "pickle"],
)  # fmt: skip
async def test_specs_that_are_no_message(
    scripts: Forger, shared_stack: Stack, client: Client, undisturbed: list[Answer], data: bytes
) -> None:
    records = Records(scripts, shared_stack)
    shared_stack.allowed.append("cannot be read")
    async with neighbours(client, undisturbed):
        reason, _ = await records.outcome(await records.admit(data))
    assert reason == "error"
