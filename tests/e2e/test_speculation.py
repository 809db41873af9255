"""Workers that guess what comes next, behind a whole stack: the answers are those of a stack that does not guess."""

from __future__ import annotations

import asyncio
import re

from tests.e2e.clients import Answer, Client, Connect, check_same
from tests.e2e.load import SLOW, SPECULATIVE, mixed
from tests.e2e.stack import NewStack
from tests.helpers import wait_until


async def accepted(client: Client) -> float:
    async with client.session.get(client.url + "/metrics") as response:
        text = await response.text()
    found = re.findall(r"^headrace_spec_decode_num_accepted_tokens_total\{[^}]*\} (\S+)", text, re.MULTILINE)
    return sum(map(float, found))


async def test_answers_are_those_without_also_when_a_worker_dies(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    """Its sequences, and what was drafted for them, go to a worker that begins to guess anew."""
    async with new_stack(workers=2, env=SLOW | SPECULATIVE) as stack:
        client = connect(stack.url)
        check_same(await client.ask_all(mixed("load")), undisturbed)
        await wait_until(lambda: accepted(client), every=0.1)
        answering = client.begin_all(mixed("load"))
        await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 10)
        victim = stack.process("worker")
        stack.kill(victim)
        await asyncio.to_thread(victim.popen.wait, 10)
        check_same(await answering, undisturbed)
        await stack.restart(victim)
        await wait_until(stack.state.all_leased)
