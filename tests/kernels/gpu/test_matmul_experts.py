"""A mixture of experts in Triton: each token's products with its own experts, however the others are spread."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.matmul import DeviceWeight, join, prepare, stack
from kernels.matmul_experts import (
    add_experts,
    add_experts_reference,
    matmul_experts,
    matmul_experts_reference,
)
from kernels.matmul_float import FloatWeight
from kernels.matmul_w8a8 import ScaledWeight
from kernels.planar_weight import GroupedCodes, pack_planes, unpack_planes
from kernels.routing import Routing, routing_of
from kernels.scaled_rows import scale_rows_reference
from tests.kernels.gpu.checks import assert_rows_alone, randn, same_bits, strided
from tests.kernels.random_weights import random_codes

EXPERTS = 5


@pytest.fixture(autouse=True)
def split_k(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Cut into splits of few columns."""
    from kernels.gpu import split_k  # while the interpreter is on

    monkeypatch.setattr(split_k, "MIN_COLUMNS", 128)
    return split_k


def weight_of(kind: str, rows: int, columns: int = 256) -> DeviceWeight:
    if kind == "floats":
        return prepare(randn(EXPERTS * rows, columns, seed=1), torch.float32, "cpu")
    if kind == "e4m3":
        scaled = scale_rows_reference(randn(EXPERTS * rows, columns, seed=1), torch.float8_e4m3fn, 128)
        return ScaledWeight(scaled.q, scaled.scale.t().contiguous())
    parts = [prepare(random_codes("Q4_K", rows, columns), torch.float32, "cpu") for _ in range(EXPERTS)]
    return join(parts)


def chosen_of(num_tokens: int, choices: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:choices] for _ in range(num_tokens)])


def pairs_in(routing: Routing) -> list[int]:
    """The pairs in tiles, each checked to be in one of its own expert."""
    flat, found = routing.chosen.flatten().tolist(), []
    for expert, slots in zip(routing.experts.tolist(), routing.slots.tolist(), strict=True):
        pairs = [pair for pair in slots if pair < routing.num_pairs]
        assert all(flat[pair] == expert for pair in pairs) and bool(pairs) == (expert >= 0)
        assert slots[: len(pairs)] == pairs
        found += pairs
    return found


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 100])
def test_every_pair_is_in_one_tile_of_its_expert(num_tokens: int) -> None:
    for chosen in (chosen_of(num_tokens) if num_tokens else torch.zeros(0, 2), torch.full((num_tokens, 2), 3)):
        routing = routing_of(chosen.long(), EXPERTS)
        assert sorted(pairs_in(routing)) == list(range(2 * num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_tiles_are_made_without_looking_at_what_is_chosen(num_tokens: int) -> None:
    """Tensors without numbers are enough, so the host waits for none."""
    made, like = routing_of(chosen_of(num_tokens).to("meta"), EXPERTS), routing_of(chosen_of(num_tokens), EXPERTS)
    assert (made.slots.shape, made.experts.shape) == (like.slots.shape, like.experts.shape)
    assert made.slots.is_meta and made.experts.is_meta


@pytest.mark.parametrize("kind", ["floats", "e4m3", "codes"])
def test_against_the_specification(kind: str) -> None:
    for num_tokens, rows in ((1, 3), (19, 65)):
        weight, x = weight_of(kind, rows), randn(num_tokens, 256)
        routing = routing_of(chosen_of(num_tokens), EXPERTS)
        got = matmul_experts(strided(x), weight, routing)
        want = matmul_experts_reference(x, weight, routing, torch.float32)
        assert got.shape == (2 * num_tokens, rows)
        torch.testing.assert_close(got, want, atol=want.abs().max().item() * 1e-5, rtol=0)


def test_a_row_for_each_pair() -> None:
    weight, x, routing = weight_of("floats", 9), randn(14, 256), routing_of(chosen_of(7), EXPERTS)
    got = matmul_experts(x, weight, routing)
    assert isinstance(weight, FloatWeight)
    for pair, expert in enumerate(routing.chosen.flatten().tolist()):
        want = weight.tensor[expert * 9 : expert * 9 + 9] @ x[pair]
        torch.testing.assert_close(got[pair], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["floats", "codes"])
def test_splits_are_added_in_one_order(kind: str, split_k: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, routing = weight_of(kind, 5), randn(3, 256), routing_of(chosen_of(3), EXPERTS)
    apart = matmul_experts(x, weight, routing)
    monkeypatch.setattr(split_k, "ENOUGH_UNCUT", 1)
    assert same_bits(matmul_experts(x, weight, routing), apart)


@pytest.mark.parametrize("for_pairs", [False, True])
def test_columns_in_orders_of_the_experts_own(for_pairs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    each = []
    for expert in range(EXPERTS):
        order = torch.randperm(256, generator=generator) if expert % 2 else None
        codes = torch.randint(0, 16, (9, 256), generator=generator).byte()
        each.append(pack_planes(GroupedCodes(4, codes, torch.rand(9, 2, generator=generator), None, 8, order)))
    routing = routing_of(chosen_of(7), EXPERTS)
    x = randn(14 if for_pairs else 7, 256)
    got = matmul_experts(x, stack(each), routing)
    for pair, expert in enumerate(routing.chosen.flatten().tolist()):
        want = unpack_planes(each[expert]) @ x[pair if for_pairs else pair // 2]
        torch.testing.assert_close(got[pair], want, atol=2e-3, rtol=1e-4)


def test_a_token_has_one_result() -> None:
    weight = weight_of("floats", 9, 64)
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    table = torch.cat((randn(4, 64), chosen_of(4).float(), weights), 1)

    def op(rows: torch.Tensor) -> tuple[torch.Tensor]:
        parts = matmul_experts(rows[:, :64], weight, routing_of(rows[:, 64:66].long(), EXPERTS))
        return (add_experts(parts, rows[:, 66:]),)

    assert_rows_alone(op, table, counts=(3, 20))


def test_the_sum_is_weighted_in_the_order_of_choices() -> None:
    for columns in (1, 63, 1100):
        parts, weights = randn(6, columns).half(), randn(2, 3, seed=1)
        got = add_experts(strided(parts), weights)
        torch.testing.assert_close(got, add_experts_reference(parts, weights), atol=1e-3, rtol=1e-3)
    assert add_experts(randn(0, 8), torch.zeros(0, 3)).shape == (0, 8)


def test_refuses_what_does_not_fit() -> None:
    weight, routing = weight_of("floats", 4, 64), routing_of(chosen_of(3), EXPERTS)
    with pytest.raises(ValueError, match="x .4, 64. with experts .3, 2."):
        matmul_experts(randn(4, 64), weight, routing)
    with pytest.raises(ValueError, match="20 rows for 3 experts"):
        matmul_experts(randn(3, 64), weight, routing_of(chosen_of(3) % 3, 3))
    with pytest.raises(ValueError, match="add_experts"):
        add_experts(randn(5, 8), torch.zeros(2, 3))
    codes = torch.zeros(EXPERTS, 64, dtype=torch.uint8)
    turned = pack_planes(GroupedCodes(4, codes, torch.ones(EXPERTS, 1), order=torch.arange(64).flip(0)))
    with pytest.raises(ValueError, match="not each expert's"):
        matmul_experts(randn(3, 64), turned, routing)
