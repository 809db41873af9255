"""Norms, rotary embedding, activations and soft capping: right, and a row's bits do not depend on where it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.gelu_tanh import gelu_tanh
from kernels.layer_norm import layer_norm
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul
from kernels.softcap import softcap_
from tests.kernels.threads import torch_threads


@pytest.mark.parametrize("dim", [1, 63, 100, 576])
def test_rms_norm(dim: int) -> None:
    x, weight = torch.randn(7, dim) * 3, torch.randn(dim)
    want = (x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).float()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(rms_norm(torch.zeros(2, dim), weight, 1e-5), torch.zeros(2, dim))


@pytest.mark.parametrize("dim", [1, 63, 100])
def test_silu_mul(dim: int) -> None:
    x = torch.randn(5, 2 * dim) * 8
    want = torch.nn.functional.silu(x[:, :dim].double()) * x[:, dim:].double()
    torch.testing.assert_close(silu_mul(x), want.float(), atol=1e-5, rtol=1e-5)
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert silu_mul(extreme).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("dim", [1, 63, 100, 576])
def test_layer_norm(dim: int) -> None:
    x, weight, bias = torch.randn(7, dim) * 3 + 1, torch.randn(dim), torch.randn(dim)
    want = torch.nn.functional.layer_norm(x.double(), (dim,), weight.double(), bias.double(), 1e-5).float()
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), want, atol=1e-5, rtol=1e-5)


def test_gelu_tanh() -> None:
    x = torch.cat((torch.randn(3, 100) * 4, torch.tensor([-300.0, 300.0, 0.0] + [1e-6] * 97)[None]))
    want = torch.nn.functional.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(gelu_tanh(x), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(cap: float) -> None:
    x = torch.cat((torch.randn(3, 63) * 20, torch.tensor([-1e30, 1e30, 0.0] + [-torch.inf] * 60)[None]))
    want = ((x.double() / cap).tanh() * cap).float()
    torch.testing.assert_close(softcap_(x.clone(), cap), want, atol=3e-7 * cap, rtol=1e-6)


@pytest.mark.parametrize("dim", [2, 16, 100])
def test_rope_turns_pairs(dim: int) -> None:
    x, angles = torch.randn(5, 3, dim), torch.rand(5, dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    got = rope(x, torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones(5, 1, 1), angles[:, None])
    torch.testing.assert_close(got, torch.cat((pairs.real, pairs.imag), -1), atol=1e-5, rtol=1e-5)


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.linspace(0.5, 2.0, x.shape[1]), 1e-6),
    "layer_norm": lambda x: layer_norm(x, torch.linspace(0.5, 2.0, x.shape[1]), torch.ones(x.shape[1]), 1e-6),
    "silu_mul": silu_mul,
    "gelu_tanh": gelu_tanh,
    "softcap": lambda x: softcap_(x.clone(), 3.0),
    "rope": lambda x: rope(
        x.view(len(x), 2, -1), x.new_ones(len(x), x.shape[1] // 2) * 0.3, x.new_ones(len(x), x.shape[1] // 2) * 0.7
    ),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dim", [4, 52, 100, 1536])
def test_a_row_has_one_result(name: str, dim: int) -> None:
    rows = torch.randn(8, dim) * 4
    alone = [OPS[name](row[None])[0] for row in rows]
    for threads in (1, 2, 3):
        with torch_threads(threads):
            for count in (2, 3, 5, 8, 33, 100, 515):
                index = torch.randint(0, 8, (count,))
                got = OPS[name](rows[index])
                assert all(torch.equal(got[i], alone[j]) for i, j in enumerate(index.tolist())), (threads, count)


def test_refuse_other_types_and_shapes() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match="rms_norm"):
        rms_norm(x.half(), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(x, torch.ones(3), 1e-6)
    with pytest.raises(TypeError, match="layer_norm"):
        layer_norm(x.half(), torch.ones(4), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="layer_norm"):
        layer_norm(x, torch.ones(4), torch.ones(3), 1e-6)
    with pytest.raises(TypeError, match="gelu_tanh"):
        gelu_tanh(x.double())
    with pytest.raises(TypeError, match="softcap"):
        softcap_(x, 0.0)
    with pytest.raises(TypeError, match="silu_mul"):
        silu_mul(x.double())
    with pytest.raises(ValueError, match="silu_mul"):
        silu_mul(torch.randn(2, 3))
    with pytest.raises(ValueError, match="rope"):
        rope(x[:, None], torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(TypeError, match="rope"):
        rope(x[:, None].double(), torch.ones(2, 4), torch.ones(2, 4))
