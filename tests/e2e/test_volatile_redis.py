"""A Redis without an append-only file, which the operator has accepted, comes back empty in mid-stream."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.clients import Answer, Connect, check_same, longest_pause_s
from tests.e2e.load import SLOW, USAGE, mixed, plain, words
from tests.e2e.own_redis import OwnRedis
from tests.e2e.stack import NewStack
from tests.figures import note
from tests.helpers import wait_until


async def test_gateways_put_back_what_they_answer(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer], tmp_path: Path
) -> None:
    """Every stream goes on after the tokens that its client has, also a choice that has ended and one that waits."""
    with OwnRedis(tmp_path / "redis", volatile=True) as server:
        async with new_stack(redis_url=server.url, workers=2, gateways=2, env=SLOW | {"volatile": "1"}) as stack:
            answering = connect(stack.url_of(0)).begin_all(mixed("load"))
            long = connect(stack.url_of(1)).begin_all([plain(f"long {i}", 120, **USAGE) for i in range(4)])
            await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 15)
            secret = stack.state.redis.get(stack.state.key("secret"))
            server.kill()
            server.start()
            check_same(await answering, undisturbed)
            note(put_back_pause_s=longest_pause_s(await answering))
            for i, answer in enumerate(await long):
                answer.check()
                assert answer.text == words(f"long {i}", 120)
            await wait_until(lambda: stack.state.redis.get(stack.state.key("secret")) == secret)
            assert "NOGROUP" not in "".join(p.text() for p in stack.lives)
            assert max(p.text().count("Redis is away") for p in stack.lives) < 10, "somebody loops on an error"


async def test_a_service_refuses_such_a_redis_otherwise(new_stack: NewStack, tmp_path: Path) -> None:
    with OwnRedis(tmp_path / "redis", volatile=True) as server:
        stack = new_stack(redis_url=server.url)
        stack.folder.mkdir()
        try:
            for kind in ("gateway", "scheduler", "store", "worker"):
                process = stack._start(kind, 0)
                await wait_until(lambda process=process: process.popen.poll() is not None, 20)
                assert process.popen.returncode == 78 and "keeps no append-only file" in process.text(), process.text()
                assert "Traceback" not in process.text()
        finally:
            stack.kill_all()
            stack.state.close()
