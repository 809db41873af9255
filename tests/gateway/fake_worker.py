"""A worker and its scheduler as seen through the scripts: places what is queued and commits what the test says."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from shared.bus import connect
from shared.protocol import Member, Outcome, RequestSpec, SamplingParams, TextParams, TokenChunk
from shared.records import Records, RequestRecord
from shared.scripts import CommitCode, CommitEntry, Scripts
from shared.wire import encode

LEASE_MS = 60_000
PROMPT = [1, 2, 3]


def spec(num_choices: int = 1, num_prompt_tokens: int = len(PROMPT)) -> RequestSpec:
    return RequestSpec(
        rid=secrets.token_hex(16), num_choices=num_choices, num_prompt_tokens=num_prompt_tokens, salt=bytes(32),
        sampling=SamplingParams(max_tokens=8, seed=1), text=TextParams(api="completions"),
    )  # fmt: skip


class FakeWorker:
    def __init__(self, url: str, model: str, name: str = "w-test", **capabilities: object) -> None:
        self.redis: Redis = connect(url)
        self.scripts = Scripts(self.redis, model)
        self.records = Records(self.redis, self.scripts.prefix)
        fields: dict[str, object] = {"max_model_len": 1024, "num_blocks": 64, "block_size": 16, "vocab_size": 300}
        self.member = Member.model_validate(
            {"kind": "worker", "incarnation": name, "variant": "test-variant"} | fields | capabilities
        )
        self.name = name
        self.term = 0
        self.epochs: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    async def join(self) -> FakeWorker:
        await self.scripts.join(self.member, LEASE_MS, [f"plan:{self.name}"])
        self.term, _ = await self.scripts.take_lease("run", self.name, "s-test", LEASE_MS)
        return self

    async def leave(self) -> None:
        await self.scripts.gone("worker", self.name)

    async def queued(self) -> list[str]:
        entries = await self.redis.xrange(self.scripts.key("requests"))
        return [fields[b"sid"].decode() for _, fields in entries]

    async def place(self, sid: str) -> None:
        record = await self.records.sequence(sid)
        assert record is not None
        assert await self.scripts.assign(sid, record.epoch, self.name, self.term, b"admit") == "ok"
        self.epochs[sid] = record.epoch + 1
        self.lengths[sid] = record.num_tokens

    async def commit(
        self, sid: str, ids: Sequence[int], finish: str = "", cached_tokens: int = 0, logprobs: object = None
    ) -> tuple[CommitCode, int]:
        [answer] = await self.commit_all({sid: (ids, finish)}, cached_tokens)
        return answer

    async def commit_all(
        self, tokens: dict[str, tuple[Sequence[int], str]], cached_tokens: int = 0
    ) -> list[tuple[CommitCode, int]]:
        entries = []
        for sid, (ids, finish) in tokens.items():
            first = self.lengths[sid]
            chunk = encode(TokenChunk(first=first, ids=tuple(ids), finish=finish, cached_tokens=cached_tokens))
            outcome = encode(Outcome.model_validate({"reason": finish})) if finish else b""
            entries.append(CommitEntry(sid, self.epochs[sid], first, len(ids), chunk if ids else b"", outcome))
            self.lengths[sid] = first + len(ids)
        answers = await self.scripts.commit(self.name, LEASE_MS, "s-test", b"", entries)
        assert answers is not None
        return answers

    async def fail(self, sid: str, code: str, message: str) -> None:
        await self.scripts.finish(sid, Outcome(reason="error", code=code, message=message))

    async def serve(self, reply: Callable[[RequestRecord, int], Sequence[int]], finish: str = "length") -> None:
        """Answers everything that is queued, for ever: reply(request, choice) are its tokens, committed one by one."""
        last, key = "0", self.scripts.key("requests")
        while True:
            for _, entries in await self.redis.xread({key: last}, block=1000):
                for id, fields in entries:
                    last = id.decode()
                    await self._answer(fields[b"sid"].decode(), reply, finish)
            await asyncio.sleep(0)

    async def _answer(self, sid: str, reply: Callable[[RequestRecord, int], Sequence[int]], finish: str) -> None:
        rid, _, choice = sid.rpartition(".")
        request = await self.records.request(rid)
        assert request is not None
        await self.place(sid)
        ids = list(reply(request, int(choice)))[: request.spec.sampling.max_tokens]
        for i, token_id in enumerate(ids):
            code, _ = await self.commit(sid, [token_id], finish if i == len(ids) - 1 else "")
            if code is not CommitCode.APPENDED:
                return

    async def close(self) -> None:
        await self.redis.aclose()
