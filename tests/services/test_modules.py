"""The environment that one part of Headrace hands to another."""

from __future__ import annotations

import pytest

from services import modules


def test_idle_compute_threads_give_their_cores_up_soon() -> None:
    assert modules.environ({})["GOMP_SPINCOUNT"] == "1000"


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_what_the_user_says_of_idle_compute_threads_holds(given: dict[str, str]) -> None:
    environ = modules.environ(given)

    assert environ.items() >= given.items()
    assert environ.get("GOMP_SPINCOUNT", "7") == "7"


def test_the_tree_comes_before_other_folders_of_the_path() -> None:
    assert modules.environ({"PYTHONPATH": "/other"})["PYTHONPATH"].split(":") == [str(modules.TREE), "/other"]
