"""A seeded answer is the same whoever else is served, seeded or not, and wherever it is computed."""

from __future__ import annotations

from typing import Any

from tests.e2e.clients import Answer, Client, Connect
from tests.e2e.load import USAGE, Json, plain, words
from tests.e2e.stack import NewStack
from tests.helpers import wait_until

SEED = 42


def seeded(text: str, num_tokens: int = 16, **fields: Any) -> Json:
    return plain(text, num_tokens, temperature=0.8, seed=SEED, ignore_eos=True, **USAGE, **fields)


def unseeded(number: int, num_tokens: int = 16) -> Json:
    return plain(f"neighbour {number}", num_tokens, temperature=0.8, ignore_eos=True)


def check(answer: Answer, text: str, num_tokens: int = 16) -> None:
    answer.check()
    for number, choice in answer.choices.items():
        assert choice.text == words(text, num_tokens, SEED, number)


async def test_batch_independence_of_a_seeded_answer(client: Client) -> None:
    others: set[str] = set()
    for num_neighbours in (1, 1, 1, 1, 0, 10):
        answers = await client.ask_all([seeded("P"), *(unseeded(i) for i in range(num_neighbours))])
        check(answers[0], "P")
        for answer in answers[1:]:
            answer.check()
        others |= {answer.text for answer in answers[1:2]}
    assert len(others) == 5, "who gives no seed gets another answer each time"
    for _ in range(2):
        both = await client.ask(seeded("P", n=2))
        check(both, "P")
        assert both.choices[0].text != both.choices[1].text


async def test_batch_independence_when_it_gives_way_or_moves(new_stack: NewStack, connect: Connect) -> None:
    """Seven blocks of a pool of eight are as many as an answer takes at its end."""
    env = {"scripted_num_blocks": 8, "block_size": 16, "max_model_len": 4096, "scripted_step_ms": 4}
    async with new_stack(env=env, workers=2) as stack:
        client = connect(stack.url)
        texts = [f"gives way {i}" for i in range(4)]
        bodies = [seeded(text, 90) for text in texts]
        answers = await client.ask_all([*bodies, *(unseeded(i, 90) for i in range(3))])
        for answer, text in zip(answers, texts, strict=False):
            check(answer, text, 90)
        assert any(s.epoch > 1 for s in stack.state.sequences()), "nobody gave way"
        async with stack.supervised():
            answering = client.begin(seeded("moves", 90, n=2))
            await wait_until(lambda: any(20 < s.num_tokens < 60 for s in stack.state.running()), every=0.002)
            stack.kill(stack.by_incarnation(stack.state.running()[0].worker))
            check(await answering, "moves", 90)
