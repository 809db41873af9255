"""`headrace convert MODEL TARGET`: a GGUF file from a Hugging Face folder, or a folder from a GGUF file.

Quantised weights are dequantised; a GGUF file may be quantised anew. Tokenizers of byte-level BPE go along.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from services.gpu_worker.weights import to_folder, to_gguf
from services.gpu_worker.weights.loader import open_source
from shared import model_source, settings
from shared.settings import CommonSettings

_TOKENIZER = "services.gateway.tokenizer_conversion"


class Refused(ValueError):
    """What the user can put right; one sentence."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="headrace convert", description=__doc__)
    ap.add_argument("model", metavar="MODEL", help="as for `headrace serve`")
    ap.add_argument("target", type=Path, metavar="TARGET", help="a new .gguf file, or a new folder")
    ap.add_argument(
        "--outtype", default="auto", type=str.lower, metavar="TYPE",
        choices=("auto", *(name.lower() for name in to_gguf.TYPES)),
        help="type of matrices: f32, f16 or bf16, in GGUF files also q8_0, q4_0, q4_1, q5_0 or q5_1 "
        "(default: f16 in GGUF files, bf16 in folders)",
    )  # fmt: skip
    ap.add_argument("--weights-only", action="store_true", help="leave the tokenizer out")
    args = ap.parse_args(argv)
    to_file = args.target.suffix == ".gguf"
    if args.outtype == "auto":
        args.outtype = "f16" if to_file else "bf16"
    if not to_file and args.outtype not in to_folder.DTYPES:
        ap.error(f"--outtype {args.outtype} is of GGUF files; a folder has {', '.join(to_folder.DTYPES)}")
    return args


def convert(model: Path, target: Path, outtype: str, weights_only: bool = False) -> None:
    """ValueError (ConfigError, WeightsError, Refused) for what the target cannot say; nothing of it is left then."""
    if target.exists():
        raise Refused(f"{target} exists already")
    source = open_source(model)
    with torch.inference_mode(), tqdm(desc=f"Writing {target.name}", unit="tensor", disable=None) as bar:

        def told(num_done: int, num_total: int) -> None:
            bar.total = num_total
            bar.update(num_done - bar.n)

        if target.suffix == ".gguf":
            tokenizer = {} if weights_only else _tokenizer_metadata(model)
            to_gguf.write_model(source, target, outtype.upper(), tokenizer, told)
            return
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            whole = Path(folder) / "model"
            whole.mkdir()
            if not weights_only:
                _write_tokenizer(model, whole)
            to_folder.write_model(source, whole, outtype, told)
            whole.rename(target)


def _tokenizer_metadata(model: Path) -> dict[str, Any]:
    if not model.is_dir():
        raise Refused(f"{model} is a GGUF file already: only its weights can be written anew (--weights-only)")
    metadata: dict[str, Any] = json.loads(_run(str(model)))
    return metadata


def _write_tokenizer(model: Path, folder: Path) -> None:
    if model.is_dir():
        raise Refused(f"{model} is a folder already: only its weights can be written anew (--weights-only)")
    _run(str(model), str(folder))


def _run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", _TOKENIZER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["the tokenizer could not be converted"])[-1]
        raise Refused(f"{reason} (--weights-only leaves the tokenizer out)")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        common = settings.load(CommonSettings)
        model = model_source.resolve(args.model, common.cache_dir).path
        convert(model, args.target, args.outtype, args.weights_only)
    except (ValueError, OSError, MemoryError) as e:  # of settings, files and models: sentences all
        sys.stderr.write(f"headrace convert: {e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
