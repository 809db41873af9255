"""What the images need of each other's files, as far as their text says it."""

from __future__ import annotations

import re

from shared.settings import variable
from tests.rules.product import ROOT


def test_what_triton_compiles_is_kept_in_a_volume_that_the_image_has_a_folder_for() -> None:
    worker = (ROOT / "Dockerfile").read_text().partition("FROM base AS worker\n")[2].partition("\nFROM ")[0]
    [folder] = re.findall(r"^ENV TRITON_CACHE_DIR=(\S+)$", worker, re.M)
    compose = (ROOT / "compose.gpu.yaml").read_text()
    [volume] = re.findall(rf'"(\w+):{folder}"', compose)
    assert f"\nvolumes:\n  {volume}: " in compose
    assert "apt-get install" in worker and " gcc libc6-dev " in worker, "it is compiled where the worker runs"


def test_what_workers_learn_of_answers_can_be_turned_off_where_compose_starts_them() -> None:
    worker = (ROOT / "compose.yaml").read_text().partition("\n  gpu-worker:\n")[2].partition("\nnetworks:\n")[0]
    name = variable("speculative_config")
    assert f"      {name}: ${{{name}:-}}\n" in worker + "\n"
