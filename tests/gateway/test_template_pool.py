"""Chat templates in processes that can be killed: one that hangs costs its own child and its own request."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import psutil
import pytest

from services.gateway.admission import TryLater
from services.gateway.chat_template import ChatTemplateError
from services.gateway.child_pool import NUM_CHILDREN
from services.gateway.template_pool import TemplatePool, encode_call, text_of
from tests.helpers import command_line, wait_until

NOW = datetime(2024, 7, 26, 12, 0)
ECHO = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}"
# loops without end, builds a text without end, or renders, as the message says
ODD = """{%- set what = messages[0].content -%}
{%- if what == 'loop' -%}{%- for a in range(1000) -%}{%- for b in 'x' * 1000000 -%}{%- endfor -%}{%- endfor -%}
{%- elif what == 'memory' -%}{%- set ns = namespace(t='x' * 1000000) -%}
{%- for a in range(40) -%}{%- set ns.t = ns.t ~ ns.t -%}{%- endfor -%}{{ ns.t | length }}
{%- elif what == 'long' -%}{%- for a in range(1000) -%}{{ 'x' * 1000000 }}{%- endfor -%}
{%- else -%}{{ what }}{%- endif -%}"""

MakePool = Callable[..., TemplatePool]


@pytest.fixture
async def make_pool() -> AsyncIterator[MakePool]:
    pools = []

    def make(source: str, **options: Any) -> TemplatePool:
        pools.append(TemplatePool(source, {"bos_token": "<s>"}, **options))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
    assert children() == []


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "services.gateway.template_process" in command_line(p)]


async def render(pool: TemplatePool, content: str) -> str:
    return text_of(await pool.render(encode_call([{"role": "user", "content": content}], NOW)))


@pytest.mark.parametrize("content", ["hi", "é\u2028\U0001f600\0\ud800", "x" * 1_000_000])
async def test_any_text_comes_back_as_it_went(make_pool: MakePool, content: str) -> None:
    assert await render(make_pool(ECHO), content) == f"<s>{content}2024"


async def test_children_are_started_when_needed_and_used_again(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.child_pool.START_AFTER_S", 30.0)  # however busy this machine is
    pool = make_pool(ECHO)
    assert children() == []
    for i in range(5):
        await render(pool, str(i))
    [child] = children()
    await asyncio.gather(*(render(pool, str(i)) for i in range(20)))
    assert children() == [child], "another was started for work that is over at once"


@pytest.mark.parametrize("content", ["loop", "memory", "long"])
async def test_one_without_end_costs_only_its_own_request(make_pool: MakePool, content: str) -> None:
    pool = make_pool(ODD)
    await pool.start()
    hanging = asyncio.create_task(render(pool, content))
    began = time.monotonic()
    assert await render(pool, "another") == "another"
    if content == "loop":
        assert not hanging.done(), time.monotonic() - began
    with pytest.raises(ChatTemplateError, match="takes too long|too long|cannot render"):
        await hanging
    assert await render(pool, "afterwards") == "afterwards"


async def test_where_all_hang_the_others_wait_their_turn(make_pool: MakePool) -> None:
    pool = make_pool(ODD, max_cpu_s=0.2)
    hanging = [asyncio.create_task(render(pool, "loop")) for _ in range(NUM_CHILDREN)]
    await asyncio.sleep(0)
    assert await render(pool, "patient") == "patient"
    for error in await asyncio.gather(*hanging, return_exceptions=True):
        assert isinstance(error, ChatTemplateError)


async def test_a_child_that_gets_no_time_is_given_up(make_pool: MakePool) -> None:
    pool = make_pool(ECHO, render_timeout_s=3.0)
    await pool.start()
    [child] = children()
    child.suspend()
    with pytest.raises(ChatTemplateError, match="takes too long"):
        await render(pool, "x")
    assert await render(pool, "x") == "<s>x2024"


async def test_a_child_that_has_died_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(ECHO)
    await pool.start()
    for child in children():
        child.kill()
    await wait_until(lambda: children() == [])
    assert await render(pool, "x") == "<s>x2024"


async def test_a_caller_that_leaves_does_not_get_the_next_one_its_answer(make_pool: MakePool) -> None:
    pool = make_pool(ODD)
    await pool.start()
    leaving = [asyncio.create_task(render(pool, "secret")) for _ in range(NUM_CHILDREN)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    assert [await render(pool, str(i)) for i in range(6)] == [str(i) for i in range(6)]
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*leaving, return_exceptions=True))


async def test_a_template_that_does_not_compile_is_found_at_start(make_pool: MakePool) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        await make_pool("{% if %}").start()


async def test_a_child_has_nothing_of_its_gateway(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS", "key-of-alice")
    pool = make_pool(ECHO)
    await pool.start()
    [child] = children()
    assert set(child.environ()) <= {"PYTHONPATH", "PYTHONSAFEPATH", "LC_CTYPE"}
    assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert child.rlimit(psutil.RLIMIT_AS)[0] == 1 << 30
    assert child.num_fds() <= 4


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
async def test_where_no_child_can_be_started_the_one_that_is_there_renders(
    number: int, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway without descriptors, for instance: its client is told to come back, not that it has failed."""
    pool = make_pool(ECHO)
    await pool.start()
    monkeypatch.setattr("services.gateway.child_pool.START_AFTER_S", 0)

    async def fails(*_: object, **__: object) -> None:
        raise OSError(number, "none left")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)
    assert await asyncio.gather(*(render(pool, f"{i}") for i in range(6))) == [f"<s>{i}2024" for i in range(6)]
    for child in children():
        child.kill()
    with pytest.raises(TryLater) as refusal:
        await render(pool, "nobody is there")
    assert (refusal.value.status, refusal.value.code) == (503, "busy")
    monkeypatch.undo()
    assert await render(pool, "again") == "<s>again2024"
