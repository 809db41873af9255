"""`headrace plan MODEL`: what fits on a card or on this machine, from the model's config.json or GGUF header alone.

Exit status 1 where what was asked for does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from services.gpu_worker.device import DeviceOptions
from services.gpu_worker.gpu_engine import StepLimits
from services.gpu_worker.gpu_memory import NOTHING_BESIDE
from services.gpu_worker.heads_loading import heads_of
from services.gpu_worker.kv_pool import available_bytes
from services.gpu_worker.planning import Limits, Plan, cpu_engine, draft_beside, plan_card, plan_cpu
from services.gpu_worker.weights.outline import outline
from shared import model_source, settings, speculative_config
from shared.settings import CommonSettings, DeviceSettings, WorkerSettings

# What their drivers report, in MiB.
CARDS = {
    "a10": 23028, "a100-40gb": 40960, "a100": 81920, "a6000": 49140, "b200": 183359, "h100": 81559, "h200": 143771,
    "l4": 23034, "l40s": 46068, "rtx3090": 24576, "rtx4090": 24564, "rtx5090": 32607, "rtx6000ada": 49140, "t4": 15360,
}  # fmt: skip


class Refused(ValueError):
    """What the user can put right; one sentence."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="headrace plan", description=__doc__)
    ap.add_argument("model", nargs="?", metavar="MODEL", help="as for `headrace serve`; the default model if none")
    ap.add_argument(
        "--device", default="cpu", metavar="CARD",
        help=f"cpu (this machine, the default), memory of a card (48GiB), or a card: {', '.join(CARDS)}",
    )  # fmt: skip
    ap.add_argument("--context", type=int, metavar="N", help="tokens of a sequence (default: the model's context)")
    ap.add_argument("--concurrency", type=int, default=1, metavar="N", help="such sequences at once (default 1)")
    ap.add_argument("--engine", choices=("auto", "native", "torch"), help="on a CPU, as for `headrace serve`")
    ap.add_argument("--quantization", metavar="METHOD", help="as for `headrace serve`")
    ap.add_argument("--kv-cache-dtype", metavar="TYPE", help="as for `headrace serve`")
    ap.add_argument("--kv-cache-bytes", metavar="SIZE", help="as for `headrace serve`")
    ap.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    args = ap.parse_args(argv)
    if args.concurrency < 1 or (args.context is not None and args.context < 1):
        ap.error("--context and --concurrency must be at least 1")
    return args


def memory_of(device: str) -> int | None:
    """Bytes of a card; None for the CPU."""
    name = device.lower().replace(" ", "").replace("_", "-")
    if name == "cpu":
        return None
    if name in CARDS:
        return CARDS[name] << 20
    try:
        return int(TypeAdapter(ByteSize).validate_python(device))
    except ValidationError:
        known = ", ".join(CARDS)
        raise Refused(f"--device {device}: neither cpu, nor a size like 48GiB, nor a known card ({known})") from None


def make(args: argparse.Namespace) -> tuple[Plan, str, int | None]:
    """The plan, the model's name, and the card's memory."""
    changes = {
        "engine": args.engine,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "kv_cache_bytes": args.kv_cache_bytes,
    }
    entries = {settings.variable(field): value for field, value in changes.items() if value is not None}
    environ = settings.current_environ() | entries
    own, common = settings.load(WorkerSettings, environ), settings.load(CommonSettings, environ)
    card = settings.load(DeviceSettings, environ)
    memory = memory_of(args.device)
    limits = Limits(
        own.block_size, *own.most_in_a_step(memory is not None), args.context or own.max_model_len or None,
        own.kv_cache_dtype, int(own.kv_cache_bytes) or None, card.gpu_memory_utilization, card.dtype,
    )  # fmt: skip
    source = model_source.resolve(args.model or common.model, common.cache_dir)
    found = outline(source.path, own.quantization)
    speculation, draft = speculative_config.parse(own.speculative_config, is_native=False), None
    if speculation is not None and speculation.method == "draft_model":
        path = model_source.resolve(speculation.model, common.cache_dir).path
        draft = outline(path, speculation.quantization)
    if memory is not None:
        cuda, most = torch.device("cuda"), own.most_in_a_step(True)
        on_card = draft_beside(draft, limits, cuda) if draft else NOTHING_BESIDE
        if (heads := heads_of(own, source.path, common.cache_dir)) is not None:
            options = DeviceOptions(card.dtype, card.enforce_eager, card.deterministic)
            on_card = heads.on_card(cuda, StepLimits(*most, card.gpu_memory_utilization), options)
        return plan_card(found, limits, memory, on_card), source.name, memory
    is_native = cpu_engine(found.config, own.engine, limits) == "native"
    heads = heads_of(own, source.path, common.cache_dir) if is_native else None
    beside = heads.beside(limits) if heads else None
    return plan_cpu(found, limits, own.engine, draft, beside), source.name, None


def verdict(plan: Plan, concurrency: int, memory: int | None) -> str:
    """One sentence; empty if it fits."""
    context = plan.max_model_len
    needed = plan.bytes_for(context, concurrency)
    if not plan.num_blocks:
        return f"does not fit: weights and a step take {_size(plan.weight_bytes + plan.step_bytes)}"
    if needed <= plan.pool_bytes:
        return ""
    what = f"{concurrency} x {context:,} tokens need {_size(needed)} of KV, {_size(plan.pool_bytes)} is there"
    free = available_bytes() - plan.weight_bytes - plan.step_bytes if memory is None else 0
    return f"does not fit: {what}" + (f"; --kv-cache-bytes {needed} would do" if needed <= free else "")


def _size(num_bytes: float) -> str:
    unit, name = (1 << 30, "GiB") if num_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def table(plan: Plan, name: str, concurrency: int, problem: str) -> str:
    context = plan.max_model_len
    num_tokens, most = plan.num_blocks * plan.block_size, plan.num_sequences(context)
    rows = (
        ("model", f"{name}, {plan.num_parameters / 1e6:,.1f} M parameters, context {context:,}"),
        ("weights", f"{_size(plan.weight_bytes)} ({plan.engine})"),
        ("a step", f"{_size(plan.step_bytes)} at most"),
        ("KV", f"{plan.kv_bytes_per_token:,.0f} bytes a token, {plan.block_size} tokens a block"),
        ("pool", f"{_size(plan.pool_bytes)}: {num_tokens:,} tokens in {plan.num_blocks:,} blocks"),
        ("sequences", f"{most:,} of {context:,} tokens at once; {problem or f'{concurrency} fit'}"),
    )
    return "".join(f"{title:<11}{text}\n" for title, text in rows)


def result(plan: Plan, concurrency: int, problem: str) -> dict[str, Any]:
    return asdict(plan) | {
        "kv_bytes_per_token": plan.kv_bytes_per_token, "pool_bytes": plan.pool_bytes, "concurrency": concurrency,
        "num_sequences": plan.num_sequences(plan.max_model_len), "fits": not problem,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        plan, name, memory = make(args)
    except (ValueError, OSError) as e:  # of settings, files and models: sentences all
        sys.stderr.write(f"headrace plan: {e}\n")
        return 1
    problem = verdict(plan, args.concurrency, memory)
    if args.json:
        sys.stdout.write(json.dumps(result(plan, args.concurrency, problem)) + "\n")
    else:
        sys.stdout.write(table(plan, name, args.concurrency, problem))
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
