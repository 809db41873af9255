"""Requests of all kinds to the scripted engine, and what they must be answered: by its own rule, and undisturbed.

Everything is greedy or seeded, so that an answer is a function of the request: it may be compared with that of any
other stack, whatever was killed there.
"""

from __future__ import annotations

from typing import Any

from shared import scripted_vocab as vocab

Json = dict[str, Any]

NUM_TOKENS = 48
SLOW = {"scripted_step_ms": 20, "scripted_token_ms": 1}  # for a stack: a prompt of 60 tokens takes 80 ms
SPECULATIVE = {"speculative_config": '{"method": "suffix"}'}  # for a stack: answers are what they are without


def prompt_ids(text: str) -> list[int]:
    return [vocab.BOS, *text.encode()]


def words(text: str, num_tokens: int, seed: int = 0, choice: int = 0) -> str:
    """What follows on a prompt."""
    return bytes(vocab.answer(prompt_ids(text), num_tokens, seed, choice)).decode()


def plain(text: str, num_tokens: int = NUM_TOKENS, **fields: Any) -> Json:
    return {"prompt": text, "max_tokens": num_tokens, "temperature": 0, "stream": True} | fields


def chat(text: str, num_tokens: int = NUM_TOKENS, **fields: Any) -> Json:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": num_tokens, "temperature": 0, "stream": True} | fields


def verbatim(answer: str, text: str = "", **fields: Any) -> Json:
    """A request whose answer is this text."""
    ids = [*prompt_ids(text), vocab.SCRIPT, *answer.encode()]
    return {"prompt": ids, "max_tokens": len(answer.encode()) + 5, "temperature": 0, "stream": True} | fields


USAGE: Json = {"stream_options": {"include_usage": True}}


def mixed(name: str, num_tokens: int = NUM_TOKENS) -> list[Json]:
    """17 requests with 21 sequences. Their prompts begin with the name, so that a new name finds nothing cached."""
    stop = words(f"{name} stops", num_tokens)[num_tokens // 2 :][:3]
    guessed = words(f"{name} guessed", num_tokens)
    wrong = guessed[: num_tokens // 3] + "~~" + guessed[num_tokens // 3 + 1 : -3] + "~~~"
    shared = f"{name} " + "a prefix that several have in common, longer than two blocks of the pool. "
    return [
        plain(f"{name} plain", num_tokens, **USAGE),
        plain(f"{name} longer", 2 * num_tokens, **USAGE),
        plain(f"{name} stops", num_tokens, stop=[stop, "never"], **USAGE),
        plain(f"{name} stops inclusively", num_tokens, stop=["e", "q"], include_stop_str_in_output=True, **USAGE),
        plain(f"{name} stops late", num_tokens, stop=["e", " "], min_tokens=num_tokens // 2, **USAGE),
        plain(f"{name} seeded", num_tokens, temperature=1, seed=7, n=3, **USAGE),
        plain(f"{name} seeded twice", num_tokens, temperature=0.7, seed=-5, n=2, top_p=0.9, top_k=40, logprobs=2),
        plain(f"{name} log-probabilities", num_tokens, logprobs=3, **USAGE),
        plain(f"{name} penalties", num_tokens, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.2),
        plain(f"{name} echo", num_tokens, echo=True, **USAGE),
        chat(f"{name} chat", num_tokens, **USAGE),
        chat(f"{name} chat, log-probabilities", num_tokens, logprobs=True, top_logprobs=2, stop="zz", **USAGE),
        chat(f"{name} chat, whole", num_tokens, stream=False),
        chat(f"{name} guessed", num_tokens, prediction={"type": "content", "content": wrong}, **USAGE),
        plain(shared + "one", num_tokens, stream=False, n=2, temperature=1, seed=1),
        plain(shared + "two", num_tokens, **USAGE),
        verbatim("naïve — 日本語 🙂🙃 a̐éö̲ end", f"{name} characters of several tokens"),
    ]
