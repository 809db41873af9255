"""README's table of performance from what `python -m tests.bench.performance` has measured. *Pure.*

Every row that exists is shown, also one that is lost, and what was not measured is called so.
"""

from __future__ import annotations

from typing import Any

BEGIN, END = "<!-- performance: made by `make bench` -->", "<!-- end of performance -->"
PEERS = {
    "llama_same": "llama-server, same file",
    "llama_best": "llama-server, Q4_0 made from it",
    "vllm": "vLLM, float32",
}
NOT_MEASURED = "not measured"
NOT_ASKED = "–"  # of a row that is about Headrace alone

# key of the load, what the row says, the figure, its unit
LOADS = (
    ("clients_1", "output tok/s, 1 client, prompts of 100 words, 64 tokens out", "output_tok_s"),
    ("clients_8", "the same, 8 clients", "output_tok_s"),
    ("clients_16", "the same, 16 clients", "output_tok_s"),
    ("ttft_512", "time to first token of a prompt of 512 tokens, ms", "ttft_ms.p50"),
    ("ttft_4000", "the same, 4,000 tokens", "ttft_ms.p50"),
    ("shared", "output tok/s, 8 clients, 400 words of which 90 % are shared, 32 tokens out", "output_tok_s"),
    ("shared", "the same: time to first token, median, ms", "ttft_ms.p50"),
)

Spread = dict[str, float]


def render(found: dict[str, Any]) -> str:
    """The text between the markers."""
    peers = list(PEERS)
    lines = [*_head(found), "", _row("", "Headrace", *PEERS.values()), "|---|" + "---|" * (1 + len(peers))]
    for key, text, figure in LOADS:
        lines.append(_load_row(found.get("loads", {}).get(key), text, figure))
    lines.append(_shared_row(found))
    lines += [_row(text, cell, *[NOT_ASKED] * len(peers)) for text, cell in _own_rows(found)]
    lines += _neighbour_rows(found.get("neighbour"))
    lines += ["", *_failures(found)]
    return "\n".join(lines).rstrip() + "\n"


def replaced(readme: str, found: dict[str, Any]) -> str:
    """README with the text between its markers made anew."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the lines {BEGIN} and {END}")
    return f"{before}{begin}\n{render(found)}{end}{after}"


def _head(found: dict[str, Any]) -> list[str]:
    machine, peers = found["machine"], found["peers"]
    versions = [f"{PEERS[key]}: {peers[key]['version']}" for key in PEERS if key in peers]
    return [
        f"{machine['cpu']} ({machine['isa']}), {machine['cores']} cores shared by engine, services and client, "
        f"{machine['memory_gib']} GiB; {machine['date']}; Headrace {found['version']}, model {found['model']}. "
        + (f"{'; '.join(versions)}. " if versions else "")
        + f"Servers are asked in turns; medians of {found['rounds']} rounds, in brackets the smallest and largest; "
        "× is Headrace's figure over the other's in the same round.",
    ]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(figures: Spread | None, factor: float = 1.0, unit: str = "") -> str:
    if figures is None:
        return NOT_MEASURED
    middle, low, high = (number(figures[name] * factor) for name in ("median", "min", "max"))
    return f"{middle}{unit} ({low}-{high})"


def _load_row(load: dict[str, Any] | None, text: str, figure: str) -> str:
    if load is None:
        return _row(text, *[NOT_MEASURED] * (1 + len(PEERS)))
    cells = []
    for key in PEERS:
        server, ratio = load["peers"].get(key), load["ratios"].get(key)
        if server is None:
            cells.append(NOT_MEASURED)
        elif server[figure] is None:
            cells.append("failed")
        else:
            times = "" if not ratio or ratio[figure] is None else f"; {ratio[figure]['median']:.2f} ×"
            cells.append(spread(server[figure]) + times)
    own = load["own"][figure]
    return _row(text, "failed" if own is None else spread(own), *cells)


def _shared_row(found: dict[str, Any]) -> str:
    """What the worst of all requests but the first found in the cache, of the tokens that all share."""
    text = "the same: shared tokens that every request but one found in the cache"
    load, tokens = found.get("loads", {}).get("shared"), found.get("shared_tokens")
    if load is None or not tokens:
        return _row(text, *[NOT_MEASURED] * (1 + len(PEERS)))
    cells = []
    for server in (load["own"], *(load["peers"].get(key) for key in PEERS)):
        least = server and server["cached_tokens_of_others"]
        cells.append(NOT_MEASURED if not least else f"{number(min(least['min'], tokens))} of {tokens}")
    if "shared_prefill" in found:
        computed, needed = found["shared_prefill"]["computed"], found["shared_prefill"]["needed"]
        cells[0] += f"; {number(computed)} prompt tokens computed, {number(needed)} needed"
    return _row(text, *cells)


def _own_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    engine, rows = found.get("engine"), []
    for count in ("1", "8", "16"):
        cell = spread(engine["output_tok_s"][count]) if engine else NOT_MEASURED
        rows.append((f"the engine alone, {count} sequence{'s' if count != '1' else ''}, output tok/s", cell))
    step = found.get("step")
    cell = NOT_MEASURED
    if step:
        cell = f"{step['step_ms']:.2f} ms; {step['ratio']:.2f} × ({step['bandwidth_gb_s']:.1f} GB/s)"
    rows.append(("a step at 1 sequence, against bytes read / measured read bandwidth", cell))
    batching = found.get("batching")
    for key, text in (("fixed", "continuous against fixed batches, 32 sequences"),
                      ("fixed-compact", "the same, finished rows not computed")):  # fmt: skip
        rows.append((text, f"{spread(batching['ratios'][key], unit=' ×')}" if batching else NOT_MEASURED))
    waste = f"{100 * batching['kv_waste_100']:.1f} %" if batching else NOT_MEASURED
    rows.append(("slots of KV blocks that a sequence never writes, 100 tokens in, 64 out", waste))
    rows.append(("start to first answer, model in the cache, s", spread(found.get("start_s"))))
    idle = found.get("idle_percent")
    rows.append(("idle stack, of a core", NOT_MEASURED if idle is None else f"{idle:.1f} %"))
    return rows


def _neighbour_rows(found: dict[str, Any] | None) -> list[str]:
    kept = "output tok/s beside a busy process on one core, 1 client, of that without it"
    alone = "the same, of one thread alone"
    if found is None:
        return [_row(kept, *[NOT_MEASURED] * (1 + len(PEERS))), _row(alone, NOT_MEASURED, *[NOT_ASKED] * len(PEERS))]
    kept_by = found["kept"]
    cells = [
        "failed" if key in kept_by and kept_by[key] is None else spread(kept_by.get(key)) for key in ("own", *PEERS)
    ]
    return [_row(kept, *cells), _row(alone, spread(found["of_one_thread"]), *[NOT_ASKED] * len(PEERS))]


def _failures(found: dict[str, Any]) -> list[str]:
    """What went wrong, in sentences, so that a missing figure is never a silent one."""
    sentences = [s for load in found.get("loads", {}).values() for s in load["errors"]]
    sentences += found.get("neighbour", {}).get("errors", [])
    return [f"- {sentence}" for sentence in dict.fromkeys(sentences)]
