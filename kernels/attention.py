"""Attention of a step's query rows over the paged cache, for GPUs: chunks of prompts, single tokens and drafts alike.

    s_j = scale q.k_j, or cap tanh(scale q.k_j / cap);   out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))

over the keys j that the row sees: those up to its position, with a window only the last `window` of them. The rows of
a sequence are its last ones and lie in the cache already. They are a chain, or a tree of drafts: then a row sees all
that comes before the draft (within its window), and of the draft what its bits name. The sink is absent or a head's.

A row's result depends on its query and its keys alone. Keys are cut at multiples of PART, each part is summed by
itself in tiles, and the parts are merged in order: by one program, or by another kernel after programs for each. The
CPU's way to attend, in another order, is `paged_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import uses_triton
from kernels.kv_cache import KvCache

PART = 256  # keys
MOST_PART_BYTES = 128 << 20  # of memory for what parts give; where they need more, one program has them all
WHOLE = 1 << 30  # keys of a part where there is but one
MOST_DRAFTS = 64  # rows of a tree: bits of a word
_FEW_ROWS, _MORE_ROWS, _MANY_ROWS = 16, 32, 64
UNEVEN = 2  # the most keys of a tile, over their mean
_LONG_ROWS = 256  # of a sequence and KV head: then one program has enough to do for all keys


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences whose rows lie one after the other in q, from first_row on. Made by `attention_batch`.

    A tile is tile_rows query rows of one KV head: tile_rows / group consecutive tokens with their group of heads.
    """

    first_row: int
    num_rows: int
    longest: int  # keys of a sequence, at most
    part: int  # PART, or WHOLE: faster for long chunks, and rows then depend on how a prompt is cut
    tile_rows: int
    uneven: bool  # a few sequences have most of the keys: parts of one are to be shared between programs
    block_tables: torch.Tensor  # int32 [S, blocks]
    seq_lens: torch.Tensor  # int32 [S]: keys, those of the rows included
    row_starts: torch.Tensor  # int32 [S + 1]: rows of q
    tile_seqs: torch.Tensor  # int32 [tiles]
    tile_tokens: torch.Tensor  # int32 [tiles]: the first token of the tile, counted within its sequence's rows
    positions: torch.Tensor  # int32 [num_rows]
    ends: torch.Tensor  # int32 [num_rows]: the keys before it are those that the row may see
    tree: torch.Tensor | None  # int64 [num_rows]: bit j of a row's word is its view of the sequence's row j


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [Hq]


def attention_batch(
    num_rows: Sequence[int],
    seq_lens: Sequence[int],
    block_ids: Sequence[Sequence[int]] | torch.Tensor,
    group: int,
    *,
    first_row: int = 0,
    tree: Sequence[tuple[int, int]] | None = None,
    fast: bool = False,
    device: torch.device | str = "cpu",
) -> AttentionBatch:
    """block_ids: of each sequence, or int32 [S, blocks] on the host. group: query heads that share a KV head. tree: for
    each row its position and the bits of what it sees.

    fast: tiles are as large as the rows make worth while, and long chunks are not cut into parts; not for float32, of
    which registers hold no such tiles. Where rows shall not depend on what is computed beside them, all tiles are
    alike, since sums over keys may be in another order in others.
    """
    if any(not 1 <= n <= length for n, length in zip(num_rows, seq_lens, strict=True)):
        raise ValueError(f"attention: {list(num_rows)} rows of sequences of {list(seq_lens)}")
    if tree is not None and max(num_rows) > MOST_DRAFTS:
        raise ValueError(f"attention: a tree of {max(num_rows)} rows, at most {MOST_DRAFTS} are possible")
    starts = [first_row]
    for n in num_rows:
        starts.append(starts[-1] + n)
    tile_rows = _tile_rows(max(num_rows), group, fast)
    part = WHOLE if fast and tree is None and max(num_rows) * group >= _LONG_ROWS else PART
    tokens = tile_rows // group
    tiles = [(i, start) for i, n in enumerate(num_rows) for start in range(0, n, tokens)]
    uneven = max(seq_lens) * len(tiles) >= UNEVEN * sum(seq_lens[i] for i, _ in tiles)
    chain = [p for n, length in zip(num_rows, seq_lens, strict=True) for p in range(length - n, length)]
    ends = [length for n, length in zip(num_rows, seq_lens, strict=True) for _ in range(n)]

    def int32(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    return AttentionBatch(
        first_row, sum(num_rows), max(seq_lens), part, tile_rows, uneven,
        _table(block_ids).to(device), int32(list(seq_lens)), int32(starts),
        int32([seq for seq, _ in tiles]), int32([start for _, start in tiles]),
        int32(chain if tree is None else [position for position, _ in tree]),
        int32([p + 1 for p in chain] if tree is None else ends),
        None if tree is None else torch.tensor([_signed(bits) for _, bits in tree]).to(device),
    )  # fmt: skip


def uniform_tile_rows(group: int) -> int:
    """Of every tile, where all are alike."""
    return max(_MORE_ROWS, 1 << (group - 1).bit_length())


def _tile_rows(most_rows: int, group: int, fast: bool) -> int:
    least = uniform_tile_rows(group)
    if not fast or _FEW_ROWS < most_rows * group < _LONG_ROWS:
        return least
    return _FEW_ROWS if most_rows * group <= _FEW_ROWS else max(least, _MANY_ROWS)


def _table(block_ids: Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
    if isinstance(block_ids, torch.Tensor):
        return block_ids
    width = max(len(ids) for ids in block_ids)
    return torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in block_ids], dtype=torch.int32)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def attention(
    q: torch.Tensor,
    cache: KvCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [N, Hq, D] → out of the same type and shape; only the batch's rows of out are written."""
    _check(q, cache, batch, options)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"attention: out {tuple(out.shape)} for q {tuple(q.shape)}")
    if uses_triton(q):
        from kernels.gpu.attention import attention_triton  # where there is no GPU, there need be no Triton

        attention_triton(q, cache, batch, options, out)
    else:
        attention_reference(q, cache, batch, options, out)
    return out


def attention_reference(
    q: torch.Tensor, cache: KvCache, batch: AttentionBatch, options: AttentionOptions, out: torch.Tensor
) -> None:
    starts, seq_lens = batch.row_starts.tolist(), batch.seq_lens.tolist()
    for i, length in enumerate(seq_lens):
        keys, values = (
            _read(x, scale, batch.block_tables[i], length)
            for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )
        rows = slice(starts[i], starts[i + 1])
        seen = visible(batch, options.window, i, length)
        out[rows] = _attend(q[rows].float(), keys, values, seen, options).to(out.dtype)


def visible(batch: AttentionBatch, window: int | None, seq: int, length: int) -> torch.Tensor:
    """Which keys the rows of a sequence see: bool [rows, length]."""
    start, end = (int(x) - batch.first_row for x in batch.row_starts[seq : seq + 2])
    keys = torch.arange(length)
    positions = batch.positions[start:end, None].cpu()
    seen = keys <= positions if batch.tree is None else (keys < batch.ends[start:end, None].cpu())
    if window is not None:
        seen = seen & (keys > positions - window)
    if batch.tree is None:
        return seen
    base = length - (end - start)
    bits = batch.tree[start:end, None].cpu() >> (keys - base).clamp(0, MOST_DRAFTS - 1) & 1
    return torch.where(keys < base, seen, bits == 1)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """q [rows, Hq, D], keys and values [length, Hkv, D], seen [rows, length] → [rows, Hq, D], float32."""
    num_rows, num_heads, dim = q.shape
    grouped = q.view(num_rows, keys.shape[1], -1, dim)
    scores = torch.einsum("nhgd,thd->nhgt", grouped, keys) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, keys.shape[1], -1, 1).expand(num_rows, -1, -1, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("nhgt,thd->nhgd", weights, values).reshape(num_rows, num_heads, dim)


def _read(x: torch.Tensor, scale: torch.Tensor | None, block_ids: torch.Tensor, length: int) -> torch.Tensor:
    """A sequence's keys or values as floats, [length, Hkv, D]."""
    blocks = block_ids[: -(-length // x.shape[2])].long()
    values = x.view(torch.uint8)[blocks].view(x.dtype).float()
    if scale is not None:
        values = values * scale[blocks].unsqueeze(-1)
    return values.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])[:length]


def _check(q: torch.Tensor, cache: KvCache, batch: AttentionBatch, options: AttentionOptions) -> None:
    num_kv_heads, dim = cache.k.shape[1], cache.k.shape[3]
    if q.dim() != 3 or q.shape[2] != dim or q.shape[1] % num_kv_heads or cache.k.shape != cache.v.shape:
        raise ValueError(f"attention: q {tuple(q.shape)}, cache {tuple(cache.k.shape)}")
    if batch.first_row + batch.num_rows > q.shape[0] or q.shape[1] // num_kv_heads > batch.tile_rows:
        raise ValueError(f"attention: a batch of other rows or heads than q {tuple(q.shape)}")
    if batch.block_tables.shape[1] * cache.k.shape[2] < batch.longest:
        raise ValueError(f"attention: {batch.longest} keys are more than {batch.block_tables.shape[1]} blocks hold")
    if options.window is not None and (options.window < 1 or (batch.tree is not None and options.window < MOST_DRAFTS)):
        raise ValueError(f"attention: a window of {options.window}")
    if options.sinks is not None and options.sinks.shape != q.shape[1:2]:
        raise ValueError(f"attention: sinks {tuple(options.sinks.shape)} for {q.shape[1]} heads")
