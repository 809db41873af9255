"""The native row ops against their references: norm, SiLU-mul, rotary embedding with the cache write, attention."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch

from kernels.native.build import Isa
from kernels.native.library import NativeLibrary
from kernels.native.structs import Layer, Model, Step, address
from kernels.paged_attention import QuerySpan, paged_attention_reference
from kernels.rms_norm import rms_norm_reference
from kernels.rope import rope_reference
from kernels.scaled_rows import scale_rows_reference
from kernels.silu_mul import silu_mul_reference
from tests.kernels.native_libraries import ISAS, library_for

EPS = 1e-5


@pytest.fixture(scope="module", params=ISAS, ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    isa: Isa = request.param
    return library_for(isa)


@pytest.mark.parametrize("columns", [16, 48, 576, 4096])
def test_norm(library: NativeLibrary, columns: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, columns) * 10, torch.randn(columns)
    y = torch.full_like(x, torch.nan)
    library.norm(address(x), address(weight), EPS, 5, columns, columns, address(y))
    torch.testing.assert_close(y, rms_norm_reference(x, weight, EPS), atol=1e-5, rtol=1e-5)


def test_norm_of_rows_that_are_padded(library: NativeLibrary) -> None:
    x, weight = torch.zeros(2, 32), torch.zeros(32)
    x[:, :20], weight[:20] = torch.randn(2, 20), torch.randn(20)
    y = torch.full_like(x, torch.nan)
    library.norm(address(x), address(weight), EPS, 2, 20, 32, address(y))
    torch.testing.assert_close(y[:, :20], rms_norm_reference(x[:, :20], weight[:20], EPS), atol=1e-5, rtol=1e-5)
    assert (y[:, 20:] == 0).all()


def test_silu_mul(library: NativeLibrary) -> None:
    gate = torch.linspace(-120, 120, 4096).view(4, 1024)
    up = torch.randn(4, 1024)
    y = torch.full_like(gate, torch.nan)
    library.silu_mul(address(gate), address(up), address(y), 4, 1024)
    torch.testing.assert_close(y, silu_mul_reference(torch.cat((gate, up), dim=1)), atol=1e-6, rtol=2e-6)


class Attention:
    """One layer's cache and the structures around it; blocks are scattered."""

    def __init__(self, heads: int, kv_heads: int, dim: int, block_size: int, lengths: list[int],
                 in_bytes: bool = False) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.dim, self.block_size = heads, kv_heads, dim, block_size
        self.padded = -(-dim // 16) * 16
        blocks = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(blocks)).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in blocks]
        slots = sum(blocks) * kv_heads * block_size
        # what an earlier owner left behind must not show
        self.in_bytes = in_bytes
        self.k = np.full(slots * dim, 99, np.int8) if in_bytes else np.full(slots * dim, np.nan, np.float16)
        self.v = np.full(slots * self.padded, self.k[0], self.k.dtype)
        self.scales = np.full((2, slots), np.nan, np.float32)
        angles = torch.rand(max(lengths), dim // 2) * 6
        self.cos, self.sin = angles.cos().contiguous(), angles.sin().contiguous()
        self.layer = Layer(k_cache=self.k.ctypes.data, v_cache=self.v.ctypes.data)
        if in_bytes:
            self.layer.k_scale, self.layer.v_scale = (scales.ctypes.data for scales in self.scales)
        self.model = Model(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_size=block_size, eps=EPS,
            query_scale=dim**-0.5 * math.log2(math.e), cos=address(self.cos), sin=address(self.sin),
        )  # fmt: skip

    def slot(self, sequence: int, place: int) -> int:
        return self.tables[sequence][place // self.block_size] * self.block_size + place % self.block_size

    def run(
        self, library: NativeLibrary, qkv: torch.Tensor, spans: list[tuple[int, int, int]],
        paths: dict[int, list[int]] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """spans: (sequence, first position, rows); qkv [rows, (Hq + 2 Hkv) * D]. Writes K and V, then attends.
        paths: of rows of a tree behind the first row of the only span: those that they follow, and themselves."""
        rows, first_rows = 0, []
        for _, _, count in spans:
            first_rows.append(rows)
            rows += count
        positions = np.array([p for _, first, n in spans for p in range(first, first + n)], np.int32)
        row_slots = np.array([self.slot(s, p) for s, first, n in spans for p in range(first, first + n)], np.int32)
        path_ends, path_slots = [0], list[int]()
        for row in range(rows if paths else 0):
            path_slots += [row_slots[r] for r in (paths or {}).get(row, ())]
            path_ends.append(len(path_slots))
            positions[row] = spans[0][1] + path_ends[-1] - path_ends[-2]
        table: list[int] = []
        native_spans = []
        for (sequence, first, count), row in zip(spans, first_rows, strict=True):
            native_spans.append((row, count, first, len(table)))
            table += self.tables[sequence]
        arrays: dict[str, Any] = {
            "positions": positions, "row_slots": row_slots, "spans": np.array(native_spans, np.int32),
            "block_ids": np.array(table, np.int32),
        }  # fmt: skip
        if paths:
            arrays |= {"path_ends": np.array(path_ends, np.int32), "path_slots": np.array(path_slots, np.int32)}
        step = Step(num_rows=rows, num_spans=len(spans), **{k: a.ctypes.data for k, a in arrays.items()})
        q = torch.full((rows, self.heads, self.padded), torch.nan)
        work = qkv.clone()
        library.rope(self.model, self.layer, step, address(work), work.shape[1], address(q))
        out = torch.full((rows, self.heads, self.dim), torch.nan)
        scratch = torch.full((library.attend_scratch(self.model),), torch.nan)
        library.attend(self.model, self.layer, step, address(q), address(out), address(scratch))
        return out

    def stored(self, heads: torch.Tensor) -> torch.Tensor:
        if not self.in_bytes:
            return heads.half().float()
        return scale_rows_reference(heads.reshape(-1, self.dim), torch.int8).dequantized().view(heads.shape)

    def reference(
        self, qkv: torch.Tensor, spans: list[tuple[int, int, int]], history: list[torch.Tensor]
    ) -> torch.Tensor:
        """history: qkv of each sequence from position 0 on."""
        out = []
        row = 0
        for sequence, first, count in spans:
            all_rows = history[sequence][: first + count].view(first + count, -1, self.dim)
            n = first + count
            turned = rope_reference(
                all_rows[:, : self.heads + self.kv_heads],
                torch.cat((self.cos[:n], self.cos[:n]), 1), torch.cat((-self.sin[:n], self.sin[:n]), 1),
            )  # fmt: skip
            k = self.stored(turned[:, self.heads :]).transpose(0, 1)[None]  # one block of n slots
            v = self.stored(all_rows[:, self.heads + self.kv_heads :]).transpose(0, 1)[None]
            span = QuerySpan(first, count, first, (0,))
            out.append(paged_attention_reference(turned[:, : self.heads], k, v, [span], self.dim**-0.5))
            row += count
        return torch.cat(out)


GEOMETRIES = [
    (4, 2, 16, 16),
    (6, 2, 64, 16),
    (9, 3, 64, 64),
    (5, 5, 80, 8),
    (8, 1, 24, 1),
    (4, 4, 128, 32),
    (3, 1, 8, 16),
]


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_attention(library: NativeLibrary, geometry: tuple[int, int, int, int], in_bytes: bool) -> None:
    """Chunks at odd places, single rows, several sequences; then every row alone has the same bits."""
    torch.manual_seed(4)
    heads, kv_heads, dim, _ = geometry
    lengths = [150, 67]
    attention = Attention(*geometry, lengths, in_bytes)
    history = [torch.randn(n, (heads + 2 * kv_heads) * dim) for n in lengths]
    steps = [[(0, 0, 100), (1, 0, 13)], [(1, 13, 1), (0, 100, 1)], [(0, 101, 49), (1, 14, 53)]]
    results = []
    for spans in steps:
        qkv = torch.cat([history[s][first : first + n] for s, first, n in spans])
        got = attention.run(library, qkv, spans)
        torch.testing.assert_close(got, attention.reference(qkv, spans, history), atol=2e-3, rtol=2e-3)
        results.append(got)
    alone = Attention(*geometry, lengths, in_bytes)
    alone.cos, alone.sin = attention.cos, attention.sin
    alone.model.cos, alone.model.sin = address(alone.cos), address(alone.sin)
    for sequence in (0, 1):
        rows = [alone.run(library, history[sequence][p : p + 1], [(sequence, p, 1)]) for p in range(lengths[sequence])]
        together = torch.cat([
            results[i][sum(n for _, _, n in spans[:j]) : sum(n for _, _, n in spans[: j + 1])]
            for i, spans in enumerate(steps) for j, (s, _, _) in enumerate(spans) if s == sequence
        ])  # fmt: skip
        assert torch.equal(torch.cat(rows), together)


def test_attention_over_several_splits(library: NativeLibrary) -> None:
    torch.manual_seed(5)
    attention = Attention(4, 2, 64, 16, [1300])
    history = [torch.randn(1300, 8 * 64)]
    for spans in ([(0, 0, 1290)], [(0, 1290, 1)], [(0, 1291, 9)]):
        qkv = torch.cat([history[s][first : first + n] for s, first, n in spans])
        got = attention.run(library, qkv, spans)
        torch.testing.assert_close(got, attention.reference(qkv, spans, history), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("num_before", [5, 63, 120, 508])
def test_rows_of_a_tree_have_the_bits_of_their_path_alone(
    library: NativeLibrary, geometry: tuple[int, int, int, int], in_bytes: bool, num_before: int
) -> None:
    """In slots behind the cached ones, over the ends of tiles and splits."""
    torch.manual_seed(6)
    heads, kv_heads, dim, _ = geometry
    num_rows = 20  # more than attention takes at once, the first of them before the tree
    attention = Attention(*geometry, [num_before + num_rows], in_bytes)
    before, tree = (torch.randn(n, (heads + 2 * kv_heads) * dim) for n in (num_before, num_rows))
    attention.run(library, before, [(0, 0, num_before)])
    paths: dict[int, list[int]] = {}
    for row in range(1, num_rows):
        parent = row - 1 if row % 4 > 1 else int(torch.randint(0, row, ()))
        paths[row] = [*paths.get(parent, []), row]
    assert max(map(len, paths.values())) > 2
    kept = [a.copy() for a in (attention.k, attention.v, attention.scales)]
    got = attention.run(library, tree, [(0, num_before, num_rows)], paths)
    for row, path in paths.items():
        for array, old in zip((attention.k, attention.v, attention.scales), kept, strict=True):
            array[...] = old
        chain = tree[[0, *path]]
        want = attention.run(library, chain, [(0, num_before, len(chain))])
        assert torch.equal(got[row], want[-1]), (row, path)
    assert got.isfinite().all()


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_slots_move_as_if_they_had_been_written_there(
    library: NativeLibrary, geometry: tuple[int, int, int, int], in_bytes: bool
) -> None:
    torch.manual_seed(7)
    heads, kv_heads, dim, _ = geometry
    attention, want = (Attention(*geometry, [40], in_bytes) for _ in range(2))
    want.tables, want.cos, want.sin = attention.tables, attention.cos, attention.sin
    want.model.cos, want.model.sin = attention.model.cos, attention.model.sin
    rows = torch.randn(24, (heads + 2 * kv_heads) * dim)
    attention.run(library, rows[:20], [(0, 0, 20)])
    attention.run(library, rows[20:], [(0, 20, 4)], {1: [1], 2: [2], 3: [2, 3]})
    layers = (Layer * 1)(attention.layer)
    attention.model.num_layers, attention.model.layers = 1, layers
    slots = np.array([[attention.slot(0, p) for p in own] for own in ((22, 23), (21, 22))], np.int32)
    pointers = (own.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)) for own in slots)
    library.move_slots(attention.model, *pointers, 2)
    want.run(library, rows[[*range(21), 22, 23]], [(0, 0, 23)])
    query = torch.randn(1, rows.shape[1])
    got, expected = (a.run(library, query, [(0, 23, 1)]) for a in (attention, want))
    assert torch.equal(got, expected) and got.isfinite().all()


def test_large_values_stay_finite(library: NativeLibrary) -> None:
    """Beyond float16's range K and V are cut, so that a masked key is no infinity times zero."""
    attention = Attention(2, 1, 16, 16, [20])
    qkv = torch.randn(20, 64)
    qkv[:, 48:] *= 1e6
    out = attention.run(library, qkv, [(0, 0, 20)])
    assert out.isfinite().all() and out.abs().max() <= 65505
