"""What rendering a chat template costs in a process of its own: `python -m tests.bench.template_cost`.

Prints microseconds a rendering, in this process and through the pool, for a short and a long conversation.
"""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import datetime

from services.gateway import chat_template
from services.gateway.template_pool import TemplatePool, encode_call, text_of

NOW = datetime(2024, 7, 26, 12, 0)
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROUNDS = 500


async def main() -> None:
    pool = TemplatePool(CHATML, {})
    began = time.perf_counter()
    await pool.start()
    sys.stdout.write(f"start of a child: {(time.perf_counter() - began) * 1000:.0f} ms\n")
    for num_turns in (1, 40):
        turn = {"role": "user", "content": "What is a headrace? " * 10}
        messages = [turn] * num_turns
        text_of(await pool.render(encode_call(messages, NOW)))
        here, there = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            chat_template.render(CHATML, messages, now=NOW)
            between = time.perf_counter()
            text_of(await pool.render(encode_call(messages, NOW)))
            here.append(between - began)
            there.append(time.perf_counter() - between)
        medians = [sorted(times)[ROUNDS // 2] * 1e6 for times in (here, there)]
        p99 = [sorted(times)[ROUNDS * 99 // 100] * 1e6 for times in (here, there)]
        sys.stdout.write(
            f"{num_turns} turns: here {medians[0]:.0f} us, by the pool {medians[1]:.0f} us"
            f" (p99 {p99[0]:.0f}, {p99[1]:.0f})\n"
        )
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
