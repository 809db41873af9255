"""`headrace eval perplexity FILE`: how well the model foresees a text, as llama-perplexity counts it.

Compares formats and engines on one text: the lower the better, and only figures of one text, one tokenizer and one
window size compare.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from services.gpu_worker.commands import perplexity
from services.gpu_worker.commands.perplexity import Perplexity
from services.gpu_worker.device import DeviceOptions, choose_device
from services.gpu_worker.engines import load_engine
from shared import model_source, settings
from shared.cores import num_cores
from shared.settings import CommonSettings, DeviceSettings, WorkerSettings

MIN_CTX = 8


class Refused(ValueError):
    """What the user can put right; one sentence."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="headrace eval perplexity", description=__doc__)
    ap.add_argument("file", type=Path, metavar="FILE", help="a text in UTF-8")
    ap.add_argument("--model", help="as for `headrace serve`; the default model if none")
    ap.add_argument(
        "-c", "--ctx", "--ctx-size", type=int, default=512, dest="ctx", metavar="N",
        help="tokens of a window (default %(default)s)",
    )  # fmt: skip
    ap.add_argument("--chunks", type=int, default=0, metavar="N", help="look at the first N windows only")
    ap.add_argument("--engine", choices=("auto", "native", "torch"), help="as for `headrace serve`")
    ap.add_argument("--threads", type=int, default=0, metavar="N", help="as for `headrace serve`")
    ap.add_argument("--json", action="store_true", help="one JSON line instead of a sentence")
    args = ap.parse_args(argv)
    if args.ctx < MIN_CTX:
        ap.error(f"--ctx must be at least {MIN_CTX}")
    if args.chunks < 0:
        ap.error("--chunks must not be negative")
    return args


def read_windows(file: Path, model: Path, ctx: int, chunks: int) -> list[list[int]]:
    command = [sys.executable, "-m", "services.gateway.token_ids", str(model)]
    with file.open("rb") as text:
        done = subprocess.run(command, stdin=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused((done.stderr.strip().splitlines() or ["the text could not be tokenized"])[-1])
    answer = json.loads(done.stdout)
    found = perplexity.windows(answer["ids"], ctx, answer["bos_token_id"])
    if not found:
        raise Refused(f"{file} has {len(answer['ids'])} tokens, fewer than one window of {ctx}")
    return found[:chunks] if chunks else found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    own, common, asked = settings.load(WorkerSettings), settings.load(CommonSettings), settings.load(DeviceSettings)
    source = model_source.resolve(args.model or common.model, common.cache_dir)
    todo = read_windows(args.file, source.path, args.ctx, args.chunks)
    kind = args.engine or own.engine
    engine = load_engine(
        kind, source.path, common.cache_dir, block_size=own.block_size,
        max_model_len=own.max_model_len or None, kv_cache_dtype=own.kv_cache_dtype, quantization=own.quantization,
        num_threads=args.threads or own.threads or num_cores(), device=choose_device(asked.device, kind),
        needs_device=asked.device == "cuda",
        options=DeviceOptions(asked.dtype, asked.enforce_eager, asked.deterministic),
        model_impl=own.model_impl,
    )  # fmt: skip
    room = engine.info.max_num_tokens
    if args.ctx > room:
        raise Refused(f"--ctx {args.ctx} is more than the {room} tokens that the model can see at once")
    found = Perplexity()
    with tqdm(todo, desc=f"Perplexity of {source.name}", unit="window", disable=None) as bar:
        for window in bar:
            found.add(perplexity.losses(engine, window))
            bar.set_postfix_str(f"{found.value:.4f}")
    return {
        "perplexity": round(found.value, 4), "error": round(found.error, 5), "model": source.name,
        "variant": engine.info.variant, "windows": len(todo), "ctx": args.ctx, "tokens": found.num_tokens,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        result = measure(args)
    except (ValueError, OSError, MemoryError) as e:  # of settings, files and models: sentences all
        sys.stderr.write(f"headrace eval perplexity: {e}\n")
        return 1
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(
            "perplexity {perplexity:.4f} ± {error:.4f} over {tokens} tokens ({windows} windows of {ctx}); "
            "{model}, {variant}\n".format(**result)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
