"""How fast the block manager is, and what the cache costs a prompt.

Run by hand, from the root: `python -m tests.bench.bench_block_manager`. Prints operations a second of the bare manager,
and the CPU time of everything the store does for one prompt. Not a test: the numbers depend on the machine.
"""

from __future__ import annotations

import itertools
import random
import resource
import sys
import time
from collections.abc import Callable

from services.cache_store.block_manager import BlockManager
from services.cache_store.store_core import StoreCore
from shared.block_keys import chain, root_key
from shared.store_calls import Ensure, Inventory, InventoryEntry, Reconcile, Update
from shared.wire import decode, encode, pack_ids
from shared.worker_protocol import Seal

BLOCK_SIZE = 8
NUM_BLOCKS = 100_000
PROMPT_TOKENS = 500
SALT = bytes(32)
TERMS = {"reply_to": "r", "worker": "w", "run_term": 1, "pool_term": 1}


def say(name: str, value: float, unit: str) -> None:
    sys.stdout.write(f"{name:<58} {value:>12,.1f} {unit}\n")


def timed(num: int, operation: Callable[[int], object], repeats: int = 3) -> float:
    """CPU seconds of one operation, the best of some repeats."""
    best = float("inf")
    for repeat in range(repeats):
        start = time.process_time()
        for i in range(repeat * num, (repeat + 1) * num):
            operation(i)
        best = min(best, (time.process_time() - start) / num)
    return best


def prompts(num: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(50_000) for _ in range(num_tokens)] for _ in range(num)]


def operations() -> None:
    """Single operations on a pool of 100,000 blocks."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, "bench")
    packed = [pack_ids(p) for p in prompts(1000, 20)]
    order = itertools.count().__next__

    def ensure_release(i: int) -> None:
        manager.ensure(f"s{i}", 1, SALT, packed[i % 1000], order())
        manager.release(f"s{i}", 1, order())

    say("ensure + release, 20 tokens, no hit", 2 / timed(30_000, ensure_release), "operations/s")

    (long,) = prompts(1, 4096)
    packed_long = pack_ids(long)
    table = manager.ensure("long", 1, SALT, packed_long, order()).block_ids
    blocks = [tuple(long[i : i + BLOCK_SIZE]) for i in range(0, 4096, BLOCK_SIZE)]

    def seal(i: int) -> None:
        manager.seal("long", 1, i % 256, table[i % 256], blocks[i % 256], order())

    say("seal", 1 / timed(256, seal, repeats=1), "operations/s")
    say("seal, repeated", 1 / timed(20_000, seal), "operations/s")

    def grant_take(i: int) -> None:
        (spare,) = manager.grant(1, order())
        manager.take("long", 1, len(table) + i, spare, order())

    say("grant + take", 2 / timed(10_000, grant_take), "operations/s")
    say("match, 4096 tokens, all found", 1 / timed(200, lambda i: manager.match(SALT, packed_long)), "operations/s")


def blocks_through_a_full_pool() -> None:
    """Block operations when every allocation evicts: each prompt is new, computed and released."""
    manager = BlockManager(2_000, BLOCK_SIZE, "bench")
    ids = prompts(600, PROMPT_TOKENS)
    packed = [pack_ids(p) for p in ids]
    num_whole = PROMPT_TOKENS // BLOCK_SIZE

    def life(i: int) -> None:
        result = manager.ensure("s", i, SALT, packed[i], 3 * i)
        for index in range(num_whole):
            part = ids[i][index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            manager.seal("s", i, index, result.block_ids[index], part, 3 * i + 1)
        manager.release("s", i, 3 * i + 2)

    seconds = timed(200, life)
    say("blocks allocated, sealed, released and evicted", (num_whole + 1) / seconds, "blocks/s")
    say("one 500-token prompt in the bare manager, no hit", seconds * 1e6, "us")


def one_prompt_through_the_store() -> None:
    core = StoreCore("bench")
    core.open_pool("w", 1, 20_000, BLOCK_SIZE, "bench")
    core.handle(Inventory(worker="w", pool_term=1, blocks=(), last=True))
    core.handle(Reconcile(call=0, running=(), spare_block_ids=(), **TERMS))
    ids = prompts(600, PROMPT_TOKENS)
    packed = [pack_ids(p) for p in ids]
    num_whole = PROMPT_TOKENS // BLOCK_SIZE

    def call(message: Ensure | Update) -> tuple[int, ...]:
        ((_, answer),) = core.handle(decode(encode(message)))
        decode(encode(answer))
        return getattr(answer, "block_ids", ())

    def life(i: int, prompt: int) -> None:
        table = call(Ensure(call=3 * i + 1, sid="s", epoch=i, salt=SALT, ids=packed[prompt], **TERMS))
        seals = tuple(
            Seal.unchecked(
                sid="s", epoch=i, index=n, block_id=table[n],
                ids=tuple(ids[prompt][n * BLOCK_SIZE : (n + 1) * BLOCK_SIZE]),
            )
            for n in range(num_whole)
        )  # fmt: skip
        call(Update(call=3 * i + 2, seals=seals, **TERMS))
        call(Update(call=3 * i + 3, released=(("s", i),), **TERMS))

    say("one 500-token prompt, all calls encoded and decoded, no hit", timed(200, lambda i: life(i, i)) * 1e6, "us")
    say("the same, all found", timed(200, lambda i: life(1000 + i, 7)) * 1e6, "us")
    say("hashing its keys alone", timed(2000, lambda i: chain(SALT, packed[7], BLOCK_SIZE)) * 1e6, "us")


def restart() -> None:
    """Rebuilding a pool of 100,000 blocks, and what it takes to keep it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    root, entries = root_key(SALT, "bench"), []
    for n, p in enumerate(prompts(NUM_BLOCKS // 100, 100 * BLOCK_SIZE)):
        packed, parent = pack_ids(p), root
        for i, key in enumerate(chain(root, packed, BLOCK_SIZE)):
            ids = packed[i * 64 : (i + 1) * 64]
            entries.append(InventoryEntry(block_id=100 * n + i, key=key, parent_key=parent, ids=ids))
            parent = key
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, "bench")
    start = time.process_time()
    manager.rebuild(entries)
    say("rebuild of 100,000 blocks", (time.process_time() - start) * 1e3, "ms")
    start = time.process_time()
    manager.check_invariants()
    say("check_invariants on 100,000 blocks", (time.process_time() - start) * 1e3, "ms")
    say("peak memory, inventory included", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, "MiB")


if __name__ == "__main__":
    operations()
    blocks_through_a_full_pool()
    one_prompt_through_the_store()
    restart()
