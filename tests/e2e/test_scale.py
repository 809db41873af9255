"""Several of each service: together they do what one would."""

from __future__ import annotations

import itertools

from tests.e2e.clients import Connect
from tests.e2e.load import USAGE, plain, words
from tests.e2e.stack import NewStack
from tests.helpers import wait_until

NUM_REQUESTS = 6


async def test_a_prefix_is_found_whichever_scheduler_reads_the_request(new_stack: NewStack, connect: Connect) -> None:
    """Each scheduler leases one worker, and they read in turns. Until each knows of the other's it may go wrong."""
    async with new_stack(schedulers=2, stores=2, workers=2) as stack:
        client = connect(stack.url)
        rounds = itertools.count()

        async def all_but_the_first_are_cached() -> bool:
            shared = f"round {next(rounds)} " + "of a prefix that is much longer than what an offer costs. " * 5
            cached = []
            for i in range(NUM_REQUESTS):
                answer = await client.ask(plain(f"{shared}{i}", 10, **USAGE))
                answer.check()
                assert answer.text == words(f"{shared}{i}", 10) and answer.usage
                cached.append(answer.usage["prompt_tokens_details"]["cached_tokens"])
            assert cached[0] == 0
            return min(cached[1:]) > 200

        await wait_until(all_but_the_first_are_cached)
