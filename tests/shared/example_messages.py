"""One example of every message, and strategies that make any."""

from __future__ import annotations

import math
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from shared import protocol as p
from shared import store_calls as c
from shared import wire as w
from shared import worker_protocol as wp

SID = "5f1e7a9c3b2d4f60a1b2c3d4e5f60718.0"
HEAD: dict[str, Any] = {"call": 7, "reply_to": "inbox:s-1", "worker": "w-1", "run_term": 3, "pool_term": 4}
CONSTRAINT = p.Constraint(
    grammar="start: A", json_text=True, think_start_ids=(3,), think_end="</think>", think_end_ids=(4,), think_budget=9
)
SAMPLING = p.SamplingParams(max_tokens=16, temperature=0.5, seed=1 << 63, logit_bias={5: -1.5}, stop_token_ids=(2, 0))
TEXT = p.TextParams(api="chat", stop=("\n", "é"), stream=True, created=1)
CHUNK = p.TokenChunk(first=3, ids=(1, 4_294_967_295), logprobs=((-0.5, ((1, -0.5),)), (-2.0, ())), cached_tokens=16)
SEAL = wp.Seal(sid=SID, epoch=2, index=1, block_id=9, ids=(7, 8))
TAKEN = wp.Taken(sid=SID, epoch=2, index=3, block_id=11)
ENDED = wp.Ended(sid=SID, epoch=1, reason="stop")
ROW = wp.RunningSequence(sid=SID, epoch=2, num_tokens=20, num_computed=19, block_ids=(9, 11), salt=bytes(32))
BLOCK = c.InventoryEntry(block_id=1, key=b"k" * 32, parent_key=b"p" * 32, ids=w.pack_ids([1, 2]))

EXAMPLES: tuple[w.Message, ...] = (
    CONSTRAINT, SAMPLING, TEXT, CHUNK, SEAL, TAKEN, ENDED, ROW, BLOCK,
    p.RequestSpec(
        rid=SID[:-2], num_choices=2, num_prompt_tokens=5, salt=bytes(range(32)), sampling=SAMPLING, text=TEXT,
        client_id="c",
    ),
    p.TimeLimits(queue_ms=1000, first_token_ms=2000, inter_token_ms=500, total_ms=1 << 40),
    p.Outcome(reason="error", num_tokens=3, code="poison_request", message="no"),
    wp.TakeOver(term=3, inbox="s-1", ask=2),
    wp.Admit(sid=SID, epoch=2, pool_term=4, cached_length=16, block_ids=(9, 10), alone=True),
    wp.Extend(sid="", epoch=0, pool_term=4, block_ids=(11, 12)),
    wp.Remap(sid=SID, epoch=2, pool_term=4, index=1, block_id=3),
    wp.Preempt(sid=SID, epoch=2),
    wp.Cancel(sid=SID, epoch=2),
    wp.Reclaim(pool_term=4, block_ids=(11,)),
    wp.SetPolicy(max_num_batched_tokens=512, max_num_seqs=8, prefill_chunk=64),
    wp.ListInventory(pool_term=4, reply_to="cache:c-1"),
    wp.Report(
        worker="w-1", term=3, pool_term=4, running=(ROW,), spare_block_ids=(12,), taken=(TAKEN,), seals=(SEAL,),
        ended=(ENDED,), num_steps=8, tokens_per_second=99.5, hang_s=5.0,
        prefill_tokens_per_second=2000.5, taken_from=41,
    ),
    wp.RunningState(
        worker="w-1", term=3, pool_term=4, running=(ROW,), spare_block_ids=(12,), seals=(SEAL,), ask=2, num_taken=42,
    ),
    c.Inventory(worker="w-1", pool_term=4, blocks=(BLOCK,), last=True),
    c.Ensure(**HEAD, sid=SID, epoch=2, salt=bytes(32), ids=w.pack_ids([1, 2, 3]), keep_free=1),
    c.Table(
        call=7, worker="w-1", pool_term=4, sid=SID, epoch=2, status="wait", block_ids=(1,), leader="other.0",
        leader_index=2, num_needed=1, num_free=5,
    ),
    c.Grant(**HEAD, num_blocks=4),
    c.Granted(call=7, worker="w-1", pool_term=4, status="ok", spare_block_ids=(12,), num_free=5),
    c.Update(**HEAD, taken=(TAKEN,), seals=(SEAL,), dropped=((SID, 2, 9),), released=((SID, 1),), reclaimed=(12,)),
    c.Updated(call=7, worker="w-1", pool_term=4, status="ok", remaps=((SID, 2, 1, 9, 3),), num_free=5),
    c.Reconcile(**HEAD, running=((SID, 2, bytes(32), (9, 10)),), spare_block_ids=(12,)),
    c.Reconciled(call=7, worker="w-1", pool_term=4, status="not_ready", num_free=5, num_blocks=64),
    c.Match(**HEAD, salt=bytes(32), ids=w.pack_ids([1, 2])),
    c.FleetCall(
        worker="w-1", reply_to="plan:w-1", answers=((b"t" * 32, w.pack_ids([1, 2]), w.pack_ids([3])),),
        asks=((b"t" * 32, 5),),
    ),
    c.FleetChanges(store="c-1", tenant=b"t" * 32, version=6, is_all=True, words=bytes(16)),
    c.Matched(call=7, worker="w-1", pool_term=4, cached_length=16, num_free=5),
    p.Member(kind="worker", incarnation="w-1", max_model_len=512, num_blocks=64, block_size=16, variant="v"),
    p.Event(kind="left", id="w-1"),
)  # fmt: skip

MESSAGE_TYPES = [w.Message._by_tag[tag] for tag in sorted(w.Message._by_tag)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TOKEN_IDS = st.integers(0, (1 << 32) - 1)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, (1 << 63) - 1),
    str: TEXTS,
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    type(None): st.none(),
}


def any_of(cls: type[w.Message]) -> st.SearchStrategy[Any]:
    """Any valid message of this type, by its annotations and bounds."""
    hints = get_type_hints(cls)
    fields = {name: _bounded(hints[name], info.metadata) for name, info in cls.model_fields.items()}
    if cls is p.TokenChunk:
        tokens = st.lists(st.tuples(TOKEN_IDS, _value(hints["logprobs"])), max_size=4)
        return st.builds(_chunk, tokens, st.fixed_dictionaries(fields)) | st.builds(_prompt_chunk, tokens, TOKEN_IDS)
    for name in ("ids", "stop_token_ids", "think_start_ids", "think_end_ids", "allowed_ids"):
        if name in fields and hints[name] == tuple[int, ...]:
            fields[name] = st.lists(TOKEN_IDS, max_size=4).map(tuple)
    if "bad_words" in fields:
        fields["bad_words"] = st.lists(st.lists(TOKEN_IDS, max_size=3).map(tuple), max_size=3).map(tuple)
    return st.builds(cls, **fields)


def _chunk(tokens: list[tuple[int, Any]], fields: dict[str, Any]) -> p.TokenChunk:
    """As many log-probabilities as tokens, or none at all."""
    logprobs = [lp[0] if lp else (-1.0, ()) for _, lp in tokens]
    both = {"ids": tuple(i for i, _ in tokens), "logprobs": None if fields["logprobs"] is None else tuple(logprobs)}
    return p.TokenChunk(**fields | both | {"ranks": None})


def _prompt_chunk(tokens: list[tuple[int, Any]], num_behind: int) -> p.TokenChunk:
    """In the prompt; there is at least one token of it."""
    tokens = tokens or [(0, None)]
    return p.TokenChunk(
        first=-len(tokens) - num_behind, ids=tuple(i for i, _ in tokens),
        logprobs=tuple(lp[0] if lp else (-1.0, ()) for _, lp in tokens), ranks=tuple(i for i, _ in tokens),
    )  # fmt: skip


def _bounded(hint: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    bounds = {
        name: getattr(m, name)
        for m in metadata
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length")
        if getattr(m, name, None) is not None
    }
    if hint is bytes and bounds:
        return st.binary(min_size=bounds.get("min_length", 0), max_size=bounds["max_length"])
    if hint is float and bounds:
        low = bounds.get("ge", math.nextafter(bounds.get("gt", -1e300), math.inf))
        return st.floats(low, bounds.get("le", 1e300))
    if hint in (int, int | None) and bounds:
        numbers = st.integers(bounds.get("ge", 0), bounds.get("le", bounds.get("lt", 1 << 63) - 1))
        return numbers if hint is int else st.none() | numbers
    return _value(hint)


def _value(hint: Any) -> st.SearchStrategy[Any]:
    if hint in PLAIN:
        return PLAIN[hint]
    args = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(_value(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(_value, args))
    if origin is dict:
        return st.dictionaries(st.integers(0, 1 << 20), st.floats(-10, 10), max_size=3)
    if isinstance(hint, type) and issubclass(hint, w.Message):
        return any_of(hint)
    assert origin is Union or args, hint
    return st.one_of(*map(_value, args))
