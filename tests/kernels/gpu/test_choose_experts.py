"""Experts that Triton chooses are those of the specification, for every way to score, group and weigh them."""

from __future__ import annotations

import pytest
import torch

from kernels.choose_experts import ChoiceRule, choose_experts, choose_experts_reference
from tests.kernels.gpu.checks import assert_rows_alone, randn, strided

RULES = [
    (1, ChoiceRule(1, "softmax", False)),
    (5, ChoiceRule(5, "softmax", True)),
    (63, ChoiceRule(3, "softmax", False, 1.5)),
    (100, ChoiceRule(6, "sigmoid", True, 2.5)),
    (20, ChoiceRule(3, "softmax", False, 16.0, 4, 2)),
    (60, ChoiceRule(8, "sigmoid", True, 2.5, 6, 3, "top2")),
    (6, ChoiceRule(2, "sigmoid", False, 1.0, 6, 3, "top2")),
    (6, ChoiceRule(3, "softmax", False, 1.0, 3, 1)),  # more than the best group has
]


@pytest.mark.parametrize(("num_experts", "rule"), RULES)
@pytest.mark.parametrize("biased", [False, True])
def test_against_the_specification(num_experts: int, rule: ChoiceRule, biased: bool) -> None:
    logits = randn(7, num_experts)
    bias = randn(num_experts, seed=1) * 0.3 if biased else None
    chosen, weights = choose_experts(strided(logits), bias, rule)
    want, want_weights = choose_experts_reference(logits, bias, rule)
    assert chosen.dtype == torch.int64 and torch.equal(chosen, want)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


def test_of_equal_ones_the_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]])
    for op in (choose_experts, choose_experts_reference):
        assert op(logits, None, ChoiceRule(4, "softmax", True))[0].tolist() == [[1, 2, 4, 0]]
        assert op(logits, None, ChoiceRule(3, "softmax", True, 1.0, 3, 2))[0].tolist() == [[1, 2, 0]]


def test_a_token_has_one_choice() -> None:
    rule, bias = ChoiceRule(4, "sigmoid", True, 2.5, 4, 2, "top2"), randn(20, seed=1)
    assert_rows_alone(lambda rows: choose_experts(rows, bias, rule), randn(4, 20))


def test_what_is_not_finite_stays_in_its_row_and_names_experts() -> None:
    for rule in (ChoiceRule(3, "softmax", True), ChoiceRule(3, "sigmoid", True, 1.0, 3, 2, "top2")):
        logits = randn(3, 6)
        logits[0, 2], logits[1] = torch.nan, torch.nan
        chosen, weights = choose_experts(logits, None, rule)
        assert ((chosen >= 0) & (chosen < 6)).all()
        assert weights[:2].isnan().all() and weights[2].isfinite().all()


def test_no_token_chooses_nothing() -> None:
    chosen, weights = choose_experts(torch.zeros(0, 6), None, ChoiceRule(2, "softmax", True))
    assert chosen.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ChoiceRule(7, "softmax", True), "7 of 6 experts"),
        (ChoiceRule(2, "softmax", True, 1.0, 4), "in 4 groups"),
        (ChoiceRule(2, "softmax", True, 1.0, 3, 4), "4 of 3 groups"),
        (ChoiceRule(2, "tanh", True), "by tanh"),
    ],
)
def test_refuses_what_it_cannot_do(rule: ChoiceRule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_experts(torch.zeros(2, 6), None, rule)


def test_refuses_other_types() -> None:
    rule = ChoiceRule(2, "softmax", True)
    with pytest.raises(ValueError, match="logits torch.float16"):
        choose_experts(torch.zeros(2, 6).half(), None, rule)
    with pytest.raises(ValueError, match="bias"):
        choose_experts(torch.zeros(2, 6), torch.zeros(5), rule)
