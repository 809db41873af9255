"""README's table of performance: what is shown of what was measured, lost and missing rows too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.performance_table import BEGIN, END, LOADS, PEERS, number, render, replaced

ROOT = Path(__file__).parents[2]
FIGURES = ("output_tok_s", "ttft_ms.p50", "cached_tokens_of_others")


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value - 1, "max": value + 1}


def found(**more: Any) -> dict[str, Any]:
    return {
        "machine": {"cpu": "Some CPU", "isa": "AVX2", "cores": 2, "memory_gib": 24, "date": "2026-01-02"},
        "version": "1.2 (abc)", "model": "some-model", "rounds": 5, "peers": {},
    } | more  # fmt: skip


def load(own: float | None, **peers: float | None) -> dict[str, Any]:
    def server(value: float | None) -> dict[str, Any]:
        return dict.fromkeys(FIGURES, spread(value) if value is not None else None)

    ratios = {key: dict.fromkeys(FIGURES, spread(own / v) if own and v else None) for key, v in peers.items()}
    return {"own": server(own), "peers": {k: server(v) for k, v in peers.items()}, "ratios": ratios, "errors": []}


def rows(text: str) -> dict[str, list[str]]:
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in cells}


def test_nothing_measured_is_said_in_every_row() -> None:
    table = rows(render(found()))
    assert all(text in table for _, text, _ in LOADS)
    table.pop("---", None)
    assert table.pop("") == ["Headrace", *PEERS.values()]
    assert all(cells[0] == "not measured" for cells in table.values())
    assert len({len(cells) for cells in table.values()}) == 1


def test_the_machine_and_all_versions_are_named() -> None:
    text = render(found(peers={"vllm": {"url": "http://v", "version": "9.9"}}))
    for part in ("Some CPU (AVX2), 2 cores", "24 GiB", "2026-01-02", "1.2 (abc)", "some-model", "vLLM, float32: 9.9"):
        assert part in text.splitlines()[0]


def test_a_row_shows_figures_and_ratios_won_and_lost() -> None:
    table = rows(render(found(loads={"clients_8": load(150.0, llama_same=100.0, llama_best=300.0)})))
    assert table["the same, 8 clients"] == [
        "150 (149-151)", "100 (99-101); 1.50 ×", "300 (299-301); 0.50 ×", "not measured",
    ]  # fmt: skip


def test_a_peer_that_failed_is_named() -> None:
    failed = load(150.0, llama_same=None) | {"errors": ["clients_8: http://p does not answer: gone"]}
    text = render(found(loads={"clients_8": failed}))
    assert rows(text)["the same, 8 clients"][:2] == ["150 (149-151)", "failed"]
    assert text.endswith("\n- clients_8: http://p does not answer: gone\n")


def test_what_was_found_of_a_shared_prefix() -> None:
    measured = found(
        loads={"shared": load(359.0, vllm=257.0)}, shared_tokens=361,
        shared_prefill={"computed": 1400, "needed": 1345},
    )  # fmt: skip
    cells = rows(render(measured))["the same: shared tokens that every request but one found in the cache"]
    assert cells == [
        "358 of 361; 1,400 prompt tokens computed, 1,345 needed", "not measured", "not measured", "256 of 361",
    ]  # fmt: skip


def test_rows_about_headrace_alone() -> None:
    table = rows(
        render(
            found(
                engine={"output_tok_s": {"1": spread(200.0), "8": spread(700.0), "16": spread(800.0)}},
                step={"step_ms": 3.5, "ratio": 1.35, "bandwidth_gb_s": 35.0},
                batching={"ratios": {"fixed": spread(2.2), "fixed-compact": spread(1.2)}, "kv_waste_100": 0.03},
                start_s=spread(2.8), idle_percent=0.9,
                neighbour={
                    "kept": {"own": spread(0.6), "llama_same": spread(0.1), "vllm": None},
                    "of_one_thread": spread(0.95),
                },
            )
        )
    )  # fmt: skip
    assert table["the engine alone, 8 sequences, output tok/s"][0] == "700 (699-701)"
    assert "3.50 ms; 1.35 × (35.0 GB/s)" in [cells[0] for cells in table.values()]
    assert table["continuous against fixed batches, 32 sequences"][0].startswith("2.2 ×")
    assert table["idle stack, of a core"] == ["0.9 %", "–", "–", "–"]
    kept = table["output tok/s beside a busy process on one core, 1 client, of that without it"]
    assert [cell.split()[0] for cell in kept] == ["0.6", "0.1", "not", "failed"]
    assert table["the same, of one thread alone"][0].startswith("0.95")


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    text = replaced(f"a\n{BEGIN}\nold\n{END}\nb\n", found())
    assert text == f"a\n{BEGIN}\n{render(found())}{END}\nb\n"
    assert replaced(text, found()) == text
    with pytest.raises(ValueError, match="lacks"):
        replaced("nothing", found())


def test_numbers_have_three_digits() -> None:
    assert [number(x) for x in (4123.4, 563.2, 56.32, 0.9512)] == ["4,123", "563", "56.3", "0.951"]


def test_the_readme_shows_what_was_measured_last() -> None:
    text, measured = (ROOT / "README.md").read_text("utf-8"), Path(__file__).with_name("performance.json")
    assert BEGIN in text and END in text
    assert replaced(text, json.loads(measured.read_text("utf-8"))) == text, "run `make bench`"
