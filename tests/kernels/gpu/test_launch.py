"""What GPUs kernels are laid out for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.gpu import launch


@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [(8, 0, "sm_80"), (8, 6, "sm_89"), (8, 7, "sm_80"), (8, 9, "sm_89"), (9, 0, "sm_90"), (10, 3, "sm_100"),
     (12, 0, "sm_89"), (12, 1, "sm_89")],
)  # fmt: skip
def test_an_unknown_device_is_like_an_older_one_with_no_more_room(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, name: str
) -> None:
    properties = SimpleNamespace(major=major, minor=minor, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert launch._target_of_device.__wrapped__(0) is launch.TARGETS[name]


def test_a_device_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=7, minor=5, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.raises(RuntimeError, match="a GPU .sm_75. is too old"):
        launch._target_of_device.__wrapped__(0)
