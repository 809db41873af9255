"""What one worker has answered speeds up another, through real processes; and nobody else, and never what is said."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict

from tests.e2e.clients import Answer, Client, Connect, check_same
from tests.e2e.load import SLOW, SPECULATIVE, mixed, plain
from tests.e2e.stack import NewStack
from tests.helpers import wait_until

LINE = re.compile(r"^headrace_(\w+?)(?:_total)?\{([^}]*)\} (\S+)", re.MULTILINE)
FAST = {"scripted_step_ms": 2, "scripted_token_ms": 0}
PROMPT = plain("a question that many ask", 120)


async def figures(client: Client) -> defaultdict[str, float]:
    """Of the whole stack, by name and, for drafts, method."""
    async with client.session.get(client.url + "/metrics") as response:
        text = await response.text()
    sums: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in LINE.findall(text):
        method = re.search(r'method="(\w+)"', labels)
        sums[f"{name} {method[1]}" if method else name] += float(value)
    return sums


async def has_learnt(client: Client) -> bool:
    return (await figures(client))["fleet_entries"] > 100


async def accepted(client: Client) -> float:
    return (await figures(client))["spec_decode_num_accepted_tokens fleet"]


async def test_a_new_worker_gains_from_what_another_answered_and_other_tenants_do_not(
    new_stack: NewStack, connect: Connect
) -> None:
    async with new_stack(env=FAST | SPECULATIVE) as stack:
        client = connect(stack.url)
        first = await client.ask(PROMPT)
        first.check()
        for _ in range(3):
            check_same([await client.ask(PROMPT)], [first])
        await wait_until(lambda: has_learnt(client), every=0.1)
        worker = stack.process("worker")
        stack.kill(worker)
        await asyncio.to_thread(worker.popen.wait, 10)
        await stack.restart(worker)
        await wait_until(stack.state.all_leased)
        before = await accepted(client)
        check_same([await client.ask(PROMPT | {"cache_salt": "another"}) for _ in range(2)], [first, first])
        check_same([await client.ask(PROMPT | {"speculative": {"fleet": False}})], [first])

        async def has_gained() -> bool:
            check_same([await client.ask(PROMPT)], [first])
            return await accepted(client) > before + 80

        await wait_until(has_gained, every=0.1)


async def test_a_store_that_dies_with_what_it_knows_changes_no_answer_and_learns_anew(
    new_stack: NewStack, connect: Connect, undisturbed: list[Answer]
) -> None:
    async with new_stack(workers=2, env=SLOW | SPECULATIVE) as stack:
        client = connect(stack.url)

        async def has_gained() -> bool:
            check_same(await client.ask_all(mixed("load")), undisturbed)
            return await accepted(client) > 0

        await wait_until(has_gained, every=0.1)
        answering = client.begin_all(mixed("load"))
        await wait_until(lambda: sum(s.num_tokens > 3 for s in stack.state.running()) > 10)
        victim = stack.process("store")
        stack.kill(victim)
        await asyncio.to_thread(victim.popen.wait, 10)
        await stack.restart(victim)
        check_same(await answering, undisturbed)
        await wait_until(stack.state.all_leased)
        check_same(await client.ask_all(mixed("load")), undisturbed)
        await wait_until(lambda: has_learnt(client), every=0.1)
