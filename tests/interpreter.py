"""Triton in its interpreter. It decides when it is first imported whether its own functions are interpreted, and a
kernel's file when that is imported whether its kernels are: so files of such tests call `import_triton` as they are
imported themselves, and the switch is on while their tests run."""

from __future__ import annotations

import importlib.util

import pytest


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the monkeypatch ends: entry points take Triton's kernels, for tensors of the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def import_triton() -> None:
    """Skips the file that is being imported where there is no Triton, as everywhere but on Linux."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed", allow_module_level=True)
    with pytest.MonkeyPatch.context() as switch:
        interpret(switch)
        import triton

        late = "something has imported Triton to compile before it could be told to interpret"
        assert not isinstance(triton.language.cdiv, triton.JITFunction), late
