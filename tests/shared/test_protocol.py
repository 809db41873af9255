"""Messages survive the wire, old bytes stay readable, and no bytes at all do more than raise ProtocolError."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.protocol import Event, Outcome, RequestSpec, SamplingParams, TokenChunk
from shared.store_calls import Ensure, Reconcile, StoreCall
from shared.wire import (
    MAX_MESSAGE_BYTES,
    MAX_STATE_BYTES,
    Message,
    ProtocolError,
    decode,
    decode_as,
    encode,
    pack_ids,
    sequence_id,
    split_sequence_id,
    unpack_ids,
)
from shared.worker_protocol import Ended, Report, RunningSequence, RunningState
from tests.shared.example_messages import EXAMPLES, HEAD, MESSAGE_TYPES, SAMPLING, TEXT, any_of

RECORDED = json.loads((Path(__file__).parent / "data" / "messages.json").read_text())
BY_TAG = {m.TAG: m for m in EXAMPLES}
tags = pytest.mark.parametrize("tag", sorted(BY_TAG))
HOT_ROWS = {"report": (3, 5, 6, 7)}  # which fields of a hot message are lists of hot rows
wire_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
    | st.binary(max_size=9) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def wire(message: Message) -> Any:
    return msgpack.unpackb(encode(message), strict_map_key=False)


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=lambda cls: cls.TAG)
@settings(max_examples=15)
@given(data=st.data())
def test_any_message_comes_back_equal(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(any_of(cls))
    assert decode(encode(message)) == message


def test_every_message_has_an_example() -> None:
    assert set(BY_TAG) == set(RECORDED) == {cls.TAG for cls in MESSAGE_TYPES}


@tags
def test_the_wire_format_is_the_recorded_one(tag: str) -> None:
    """A change that an old reader would misread raises MAJOR; one that it ignores is recorded anew."""
    assert encode(BY_TAG[tag]).hex() == RECORDED[tag]
    assert decode(bytes.fromhex(RECORDED[tag])) == BY_TAG[tag]


@tags
def test_fields_of_a_newer_service_are_ignored(tag: str) -> None:
    name, fields = wire(BY_TAG[tag])
    if isinstance(fields, dict):
        newer: Any = fields | {"from_a_newer_one": [1, {"a": b"b"}]}
    else:
        rows = HOT_ROWS.get(tag, ())
        newer = [[r + [None] for r in f] if i in rows else f for i, f in enumerate(fields)] + ["from a newer one"]
    assert decode(packed([name, newer])) == BY_TAG[tag]


def test_fields_that_an_older_service_leaves_out_have_their_defaults() -> None:
    assert decode(packed(["event", {"kind": "left"}])) == Event(kind="left")
    name, fields = wire(BY_TAG["report"])
    assert decode(packed([name, fields[:10]])) == BY_TAG["report"].model_copy(
        update={"prefill_tokens_per_second": 0.0, "hang_s": 0.0, "taken_from": -1}
    )


@tags
def test_messages_cannot_be_changed(tag: str) -> None:
    message = BY_TAG[tag]
    with pytest.raises(ValidationError):
        setattr(message, next(iter(type(message).model_fields)), None)


def test_a_message_has_a_tag_of_its_own() -> None:
    with pytest.raises(AssertionError):
        type("Twin", (Message,), {"TAG": "event", "__module__": __name__, "__annotations__": {}})


# --- what is not a message -------------------------------------------------------------------------------------------


@given(st.binary(max_size=64) | wire_values.map(packed))
def test_random_bytes_raise_protocol_error_at_most(data: bytes) -> None:
    expect_message_or_protocol_error(data)


@tags
@settings(max_examples=20)
@given(data=st.data())
def test_damaged_messages_decode_to_valid_ones_or_not_at_all(tag: str, data: st.DataObject) -> None:
    """Hot messages are checked by hand: what they let through is what the models would."""
    tree = wire(BY_TAG[tag])
    damage(tree, data)
    expect_message_or_protocol_error(packed(tree))


def damage(tree: Any, data: st.DataObject) -> None:
    """Replaces one value somewhere in the tree, or cuts a list short."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = data.draw(st.sampled_from(keys))
        inner = tree[key]
        if isinstance(inner, (list, dict)) and inner and data.draw(st.booleans()):
            tree = inner
        elif isinstance(tree, list) and data.draw(st.booleans()):
            del tree[key:]
            return
        else:
            tree[key] = data.draw(wire_values)
            return


def expect_message_or_protocol_error(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    fields = message.model_dump(warnings="error")
    assert type(message).model_validate(fields, strict=True) == message


@given(tag=st.sampled_from(sorted(BY_TAG)), cut=st.integers(0, 400), more=st.binary(max_size=3))
def test_cut_off_messages_and_messages_with_a_tail_are_refused(tag: str, cut: int, more: bytes) -> None:
    data = encode(BY_TAG[tag])
    whole = data[:cut] + more
    if whole != data:
        with pytest.raises(ProtocolError):
            decode(data[: min(cut, len(data) - 1)])
    if more:
        with pytest.raises(ProtocolError):
            decode(data + more)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", packed(None), packed([]), packed(["event"]), packed(["event", {}, {}]), packed(["", {}]),
        packed([["event"], {}]), packed([{}, {}]), packed(["no such tag", {}]), packed([float("nan"), {}]),
        packed(["update", 5]), packed(["update", None]), packed(["update", []]), packed(["chunk", {}]),
        b"\x92\xa5event" + b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x00\x05",
        packed(["event", {"kind": "left", "id": b"\xff\xfe"}]), packed(["take_over", {"term": 1e300, "inbox": ""}]),
    ],
    ids=lambda data: data[:12].hex(),
)  # fmt: skip
def test_what_is_malformed_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_a_pickle_is_not_a_message_and_does_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    for value in (Bomb(), ["event", Bomb()], ["event", {"kind": "left"}]):
        for version in range(pickle.HIGHEST_PROTOCOL + 1):
            data = pickle.dumps(value, version)
            for wrapped in (data, packed(["event", data]), packed([data, {}])):
                with pytest.raises(ProtocolError):
                    decode(wrapped)
    assert not (tmp_path / "exploded").exists()


def test_size_is_bounded_both_ways() -> None:
    room = MAX_MESSAGE_BYTES - len(encode(Event(kind="left"))) - 4  # the header of a longer string
    largest = Event(kind="left", id="x" * room)
    assert len(encode(largest)) == MAX_MESSAGE_BYTES and decode(encode(largest)) == largest
    with pytest.raises(ProtocolError, match="larger"):
        encode(Event(kind="left", id="x" * (room + 1)))
    with pytest.raises(ProtocolError, match="larger"):
        decode(encode(largest) + b"\0")


def test_what_names_all_blocks_of_a_pool_may_be_large() -> None:
    """A pool of hundreds of thousands of blocks is taken over like any other."""
    held, spares = tuple(range(1 << 20, (1 << 20) + 400_000)), tuple(range(20_000))
    rows = tuple(
        RunningSequence(sid=f"r.{i}", epoch=1, num_tokens=9, num_computed=8, block_ids=held[i::100], salt=bytes(32))
        for i in range(100)
    )
    state = RunningState(worker="w", term=1, pool_term=1, running=rows, spare_block_ids=spares)
    running = tuple((row.sid, row.epoch, row.salt, row.block_ids) for row in rows)
    reconcile = Reconcile(**HEAD, running=running, spare_block_ids=spares)
    for message in (state, reconcile):
        data = encode(message)
        assert MAX_MESSAGE_BYTES < len(data) < MAX_STATE_BYTES // 4 and decode(data) == message


@pytest.mark.parametrize("tag", [t for t in sorted(BY_TAG) if BY_TAG[t].MAX_BYTES == MAX_MESSAGE_BYTES])
def test_no_other_message_may_be_large(tag: str) -> None:
    with pytest.raises(ProtocolError, match=f"larger than {MAX_MESSAGE_BYTES}"):
        decode(msgpack.packb([tag, b"x" * MAX_MESSAGE_BYTES]))


@pytest.mark.parametrize("tag", ["running_state", "reconcile"])
def test_what_may_be_large_has_a_bound_too(tag: str) -> None:
    with pytest.raises(ProtocolError, match=f"larger than {MAX_STATE_BYTES}"):
        decode(msgpack.packb([tag, b"x" * MAX_STATE_BYTES]))


def test_decode_as_insists_on_the_class() -> None:
    assert decode_as(Event, encode(Event(kind="left"))).kind == "left"
    with pytest.raises(ProtocolError, match="expected event"):
        decode_as(Event, encode(Outcome(reason="stop")))


def test_the_common_head_of_store_calls_is_no_message() -> None:
    with pytest.raises(ProtocolError):
        decode(encode(StoreCall(**HEAD)))


@pytest.mark.parametrize(
    "fields",
    [
        (3, b"12345", None, "", 0), (3, "1234", None, "", 0), (-1, b"", None, "", 0), (3, b"1234", [], "", 0),
        (3, b"1234", [[-1.0, []], [-1.0, []]], "", 0), (3, b"1234", [["x", []]], "", 0),
        (3, b"1234", [[-1.0, [["1", -1.0]]]], "", 0), (3, b"1234", [[-1.0, [[1, None]]]], "", 0),
        (3, b"1234", None, b"", 0), (3, b"1234", None, "", "0"), ("3", b"1234", None, "", 0), (3, b"1234", None),
    ],
    ids=str,
)  # fmt: skip
def test_chunks_are_checked(fields: tuple[Any, ...]) -> None:
    assert decode(packed(["chunk", [3, b"1234", [[-1.0, [[1, -1.0]]]], "", 0]]))
    with pytest.raises(ProtocolError):
        decode(packed(["chunk", fields]))


# --- ids and bounds --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids and len(pack_ids(ids)) == 4 * len(ids)


def test_ids_are_little_endian_and_bounded() -> None:
    assert pack_ids([1, 0xFFFFFFFF]) == b"\1\0\0\0\xff\xff\xff\xff"
    for wrong in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            pack_ids([wrong])
    with pytest.raises(ProtocolError):
        unpack_ids(b"123")


def test_a_sequence_is_a_choice_of_a_request() -> None:
    assert sequence_id("r", 3) == "r.3"
    assert split_sequence_id("a.b.12") == ("a.b", 12)


@pytest.mark.parametrize(
    "field, wrong",
    [
        ("max_tokens", -1), ("max_tokens", 1 << 25), ("temperature", -0.1), ("temperature", float("nan")),
        ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")), ("top_k", -1),
        ("min_p", -0.1), ("min_p", 1.1), ("seed", -1), ("seed", 1 << 64), ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")), ("frequency_penalty", 2.1), ("frequency_penalty", float("nan")),
        ("presence_penalty", -2.1), ("logit_bias", {1: float("nan")}), ("logit_bias", {1: float("inf")}),
        ("logit_bias", {-1: 0.0}), ("logit_bias", {1 << 32: 0.0}), ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("stop_token_ids", tuple(range(129))), ("stop_token_ids", (-1,)), ("stop_token_ids", (1 << 32,)),
        ("logprobs", 21), ("logprobs", -1),
    ],
)  # fmt: skip
def test_sampling_parameters_are_bounded(field: str, wrong: Any) -> None:
    fields = SAMPLING.model_dump()
    assert SamplingParams.model_validate(fields) == SAMPLING
    with pytest.raises(ValidationError):
        SamplingParams.model_validate(fields | {field: wrong})


@pytest.mark.parametrize(
    "field, wrong", [("num_choices", 0), ("num_choices", 129), ("num_prompt_tokens", 0), ("salt", bytes(31))]
)
def test_requests_are_bounded(field: str, wrong: Any) -> None:
    spec = RequestSpec(rid="r", num_choices=1, num_prompt_tokens=1, salt=bytes(32), sampling=SAMPLING, text=TEXT)
    with pytest.raises(ProtocolError):
        decode(packed(["request", spec.model_dump() | {field: wrong}]))


def test_hot_messages_may_be_built_unchecked() -> None:
    """What is made without checks is like the rest: compared, copied, encoded and decoded."""
    ended = Ended.unchecked(sid="r.0", epoch=1, reason="stop")
    assert ended == Ended(sid="r.0", epoch=1, reason="stop") and hash(ended) == hash(Ended(**ended.model_dump()))
    assert ended.model_copy(update={"epoch": 2}) == Ended(sid="r.0", epoch=2, reason="stop")
    with pytest.raises(ValidationError):
        ended.epoch = 2  # type: ignore[misc]
    report = Report.model_construct(worker="w", term=1, pool_term=1, ended=(ended,), tokens_per_second=0)
    assert decode(encode(report)) == Report(worker="w", term=1, pool_term=1, ended=(ended,))
    chunk = TokenChunk.unchecked(first=0, ids=[5], logprobs=[(0, [(5, 0)])], finish="", cached_tokens=0, ranks=None)
    assert decode(encode(chunk)) == TokenChunk(first=0, ids=(5,), logprobs=((0.0, ((5, 0.0),)),))


@pytest.mark.parametrize(
    "fields",
    [
        (-1, pack_ids([5, 6]), [(-1.0, [])] * 2, "", 0, pack_ids([1, 1])),  # of the prompt and of the answer
        (-2, pack_ids([5, 6]), None, "", 0, pack_ids([1, 1])),
        (-2, pack_ids([5, 6]), [(-1.0, [])] * 2, "", 0, pack_ids([1])),
        (-2, pack_ids([5, 6]), [(-1.0, [])] * 2, "", 0),
    ],
)
def test_a_chunk_of_a_prompt_is_of_it_alone_and_complete(fields: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(packed(["chunk", fields]))


def test_the_part_of_a_prompt_s_chunk_from_a_position_on() -> None:
    logprobs = ((-1.0, ()), (-2.0, ()))
    whole = TokenChunk(first=-2, ids=(5, 6), logprobs=logprobs, ranks=(1, 3))
    assert whole.after(-1) == TokenChunk(first=-1, ids=(6,), logprobs=logprobs[1:], ranks=(3,))


def test_token_ids_of_a_store_call_stay_packed() -> None:
    call = Ensure(**HEAD, sid="r.0", epoch=1, salt=bytes(32), ids=pack_ids([1, 2]))
    assert decode_as(Ensure, encode(call)).ids == pack_ids([1, 2])
