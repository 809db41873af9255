"""How a message crosses a process, and the ids that all messages speak of.

A message is a frozen pydantic model with a tag; on the wire it is msgpack `[tag, fields]`, refused when larger than
its kind may be or malformed (`ProtocolError`). Unknown fields are ignored, so that services one version apart
understand each other; a change that an old reader would misread raises `MAJOR`, which is part of every Redis key.
What messages there are is in `protocol.py`, `worker_protocol.py` and `store_calls.py`; a process can decode those that
it imports.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

MAJOR = 1
MAX_MESSAGE_BYTES = 1 << 20  # of most messages
MAX_STATE_BYTES = 16 << 20  # of those that name every block that a pool's sequences hold: three million of them


class ProtocolError(ValueError):
    """A message that cannot be decoded: the bytes are not from a Headrace service of this major version."""


def sequence_id(rid: str, choice: int) -> str:
    return f"{rid}.{choice}"


def split_sequence_id(sid: str) -> tuple[str, int]:
    rid, _, choice = sid.rpartition(".")
    return rid, int(choice)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Little-endian uint32; OverflowError for an id outside [0, 2^32)."""
    packed = array.array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are not whole uint32 ids")
    ids = array.array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


_set = object.__setattr__


class Message(BaseModel):
    """Base of all messages. A subclass names its tag; the tag table is built when the class is."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    TAG: ClassVar[str] = ""
    MAX_BYTES: ClassVar[int] = MAX_MESSAGE_BYTES
    _by_tag: ClassVar[dict[str, type[Message]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "TAG" in cls.__dict__:
            assert cls.TAG not in Message._by_tag, cls.TAG
            Message._by_tag[cls.TAG] = cls

    def to_wire(self) -> Any:
        return self.model_dump()

    @classmethod
    def from_wire(cls, fields: Any) -> Self:
        return cls.model_validate(fields)

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """A message of fields that are known to be right, all of them given: in a quarter of `model_construct`'s time,
        which hot messages take most of their decoding for."""
        message = cls.__new__(cls)
        _set(message, "__dict__", fields)
        _set(message, "__pydantic_fields_set__", set(fields))
        _set(message, "__pydantic_extra__", None)
        _set(message, "__pydantic_private__", None)
        return message


M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    data: bytes = msgpack.packb([message.TAG, message.to_wire()])
    if len(data) > message.MAX_BYTES:
        raise ProtocolError(f"{message.TAG} of {len(data)} bytes is larger than {message.MAX_BYTES}")
    return data


def decode(data: bytes) -> Message:
    if len(data) > MAX_MESSAGE_BYTES and len(data) > (bound := _bound(data)):
        raise ProtocolError(f"message of {len(data)} bytes is larger than {bound}")
    try:
        tag, fields = msgpack.unpackb(data, strict_map_key=False)
        cls = Message._by_tag[tag]
        return cls.from_wire(fields)
    except (ValueError, TypeError, KeyError, ValidationError, msgpack.UnpackException, RecursionError) as e:
        raise ProtocolError(f"undecodable message: {type(e).__name__}") from e


def _bound(data: bytes) -> int:
    """In bytes, of what this says it is; told by its first ones, before anything is unpacked."""
    heads = {msgpack.packb([tag, 0])[:-1]: cls.MAX_BYTES for tag, cls in Message._by_tag.items()}
    return next((bound for head, bound in heads.items() if data.startswith(head)), MAX_MESSAGE_BYTES)


def row(fields: Any, *types: type) -> list[Any]:
    """The first fields of a hot message, which must have exactly these types; a newer service may send more."""
    row = list(fields[: len(types)])
    if tuple(map(type, row)) != types:
        raise ProtocolError("wrong field types")
    return row


def ints(values: list[Any]) -> tuple[int, ...]:
    if any(type(v) is not int for v in values):
        raise ProtocolError("wrong field types")
    return tuple(values)


def decode_as(cls: type[M], data: bytes) -> M:
    """The message, which must be of this class."""
    message = decode(data)
    if not isinstance(message, cls):
        raise ProtocolError(f"expected {cls.TAG}, got {message.TAG}")
    return message
