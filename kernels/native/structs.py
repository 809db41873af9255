"""The structures of native.h and sampling.h, field by field, as ctypes has them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch

FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

_Fields = list[tuple[str, Any]]


class Matrix(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        *((name, c_int32) for name in ("format", "rows", "columns", "reserved")),
        *((name, c_void_p) for name in ("codes", "high", "d", "m", "sub", "sub_min")),
    ]


class Rows(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        *((name, c_void_p) for name in ("x", "q", "d", "s", "sums")),
        ("stride", c_int64),
        ("columns", c_int64),
    ]


class Linear(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [("num_parts", c_int32), ("rows", c_int32), ("parts", Matrix * 3), ("bias", c_void_p)]


class Layer(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        *((name, c_void_p) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, Linear) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("k_cache", "v_cache", "k_scale", "v_scale")),
    ]


class Model(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        *(
            (name, c_int32)
            for name in (
                "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                "vocab_size", "block_size",
            )
        ),
        ("eps", c_float),
        ("query_scale", c_float),
        *((name, c_void_p) for name in ("cos", "sin", "final_norm", "embed_norm", "token_ids")),
        ("embedding", Matrix),
        ("head", Linear),
        ("layers", POINTER(Layer)),
    ]  # fmt: skip


class NoiseKey(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [(name, ctypes.c_uint32) for name in ("seed_low", "seed_high", "position", "choice")]


class Draw(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [("temperature", c_float), ("key", NoiseKey)]


class Step(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        *((name, c_int32) for name in ("num_rows", "num_spans", "num_samples", "num_taps")),
        *(
            (name, c_void_p)
            for name in (
                "token_ids", "positions", "row_slots", "spans", "block_ids", "sample_rows", "draws", "drawn_before",
                "logits", "drawn", "inputs", "tap_layers", "taps", "path_ends", "path_slots", "mask_of",
                "masks",
            )
        ),
        ("awaits_masks", c_int32),
    ]  # fmt: skip


class Head(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("columns", c_int32), ("reads_embedding", c_int32), ("fc", Linear), ("first_norm", c_void_p),
    ]  # fmt: skip


class Chains(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("head", POINTER(Head)), ("first", POINTER(Step)),
        *((name, c_void_p) for name in ("taps", "counts", "token_ids", "logprobs")),
        ("num_places", c_int32), ("reserved", c_int32), ("later_s", c_double),
    ]  # fmt: skip


MAX_TOP = 32


class SamplingRow(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("key", NoiseKey), ("logits", c_void_p), ("raw", c_void_p), ("top_p", c_double), ("temperature", c_float),
        ("least", c_float), ("top_k", c_int32), ("num_top", c_int32),
    ]  # fmt: skip


class Sampled(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("token_id", c_int32), ("logit", c_float), ("largest", c_float), ("num_top", c_int32), ("total", c_int64),
        ("top_ids", c_int32 * MAX_TOP), ("top_logits", c_float * MAX_TOP),
    ]  # fmt: skip


def address(tensor: torch.Tensor | None) -> int | None:
    """The pointer to a contiguous tensor's data; whoever stores it keeps the tensor."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError("address: the tensor is not contiguous")
    return tensor.data_ptr()
