"""`headrace train-heads MODEL --data FILE|self --hours H --output DIR`: heads that draft for a model, EAGLE or Medusa.

The model writes the text that they learn from, by the prompts in FILE or built-in ones. A run that was ended goes on
where it was when it is started again with the same arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from services.gpu_worker.engine import TorchEngine
from services.gpu_worker.engines import load_engine
from services.gpu_worker.heads_loading import packaged_heads
from services.gpu_worker.model.config import ConfigError, ModelConfig
from services.gpu_worker.model.rope import rope_tables
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.speculative.head_config import EagleConfig, MedusaConfig, eagle_like, last_layer
from services.gpu_worker.training import prompts, self_text
from services.gpu_worker.training.beginning import Beginning, begin_with
from services.gpu_worker.training.corpus import Example, append_text, read_texts, teach
from services.gpu_worker.training.eagle import EagleHead
from services.gpu_worker.training.medusa import MedusaHeads
from services.gpu_worker.training.publish import DTYPES, publish
from services.gpu_worker.training.session import ROWS, TEXTS, Recipe, Session
from services.gpu_worker.training.trainer import Batcher, Target, Trainer, frequent_tokens, measure
from services.gpu_worker.weights.loader import open_source
from services.gpu_worker.weights.source import WeightSource
from shared import model_source, settings
from shared.cores import num_cores
from shared.settings import CommonSettings, WorkerSettings

BUILT_IN = 4000  # prompts
CONCURRENCY = 48
TEXT_SHARE = 0.3  # of the time, at most for writing
HELD_OUT = 20  # every so many texts one is kept back
SCALED_BY = 60  # texts that show how large columns are
SAVE_EVERY_S = 60.0
KV_CACHE_BYTES = 1 << 30


class Refused(ValueError):
    """What the user can put right; one sentence."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="headrace train-heads", description=__doc__)
    ap.add_argument("model", metavar="MODEL", help="as for `headrace serve`")
    ap.add_argument("--data", default="self", metavar="FILE", help="prompts, one a line: text, or JSON with `prompt` "
                    "or `messages`; `self` takes built-in ones (default)")  # fmt: skip
    ap.add_argument("--hours", type=float, required=True, metavar="H", help="of all runs into this folder together")
    ap.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the heads go, and the run's state")
    ap.add_argument("--method", choices=("eagle3", "eagle", "medusa"), default="eagle3")
    ap.add_argument("--draft-vocab-size", type=int, default=8192, metavar="N",
                    help="the most frequent tokens, which alone are drafted (default %(default)s)")  # fmt: skip
    ap.add_argument("--num-tokens", type=int, default=300_000, metavar="N", help="to write (default %(default)s)")
    ap.add_argument("--max-tokens", type=int, default=384, metavar="N", help="of one answer (default %(default)s)")
    ap.add_argument("--places", type=int, default=3, metavar="N",
                    help="drafts in a row that are learnt; of Medusa, heads (default %(default)s)")  # fmt: skip
    ap.add_argument(
        "--init-from",
        metavar="DIR",
        default="",
        help="heads to go on from, of this method, as published; "
        "theirs are the draft vocabulary and all sizes. `packaged`: those that come along with the model",
    )
    ap.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the heads' matrices in their file")
    ap.add_argument("--engine", choices=("auto", "native", "torch"), default="auto", help="as for `headrace serve`")
    ap.add_argument("--threads", type=int, default=0, metavar="N", help="as for `headrace serve`")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args(argv)
    if args.hours <= 0 or min(args.draft_vocab_size, args.num_tokens, args.max_tokens, args.places) < 1:
        ap.error("numbers must be positive")
    return args


def prompt_ids(model: Path, data: str, seed: int) -> tuple[list[list[int]], list[int]]:
    """Of all prompts, and the tokens that end an answer."""
    try:
        found = prompts.built_in(BUILT_IN, seed) if data == "self" else prompts.parse(Path(data).read_text("utf-8"))
    except ValueError as e:
        raise Refused(f"--data: {data}: {e}") from e
    command = [sys.executable, "-m", "services.gateway.prompt_ids", str(model)]
    text = "\n".join(map(json.dumps, found))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused((done.stderr.strip().splitlines() or ["the prompts could not be tokenized"])[-1])
    answer = json.loads(done.stdout)
    return answer["ids"], answer["eos_token_ids"]


class Run:
    """One process' part of a run. Time counts from here on, and what earlier ones have spent."""

    def __init__(self, args: argparse.Namespace, session: Session, engine: NativeEngine | TorchEngine) -> None:
        self._args = args
        self._session = session
        self._engine = engine
        self._total_s = 3600 * float(args.hours)
        self._started, self._before = time.monotonic(), session.spent_s
        self._saved_at = self._started

    @property
    def _spent_s(self) -> float:
        return self._before + time.monotonic() - self._started

    def time_left(self) -> float:
        return max(0.0, 1.0 - self._spent_s / self._total_s)

    def write(self, ids: list[list[int]], eos_token_ids: list[int]) -> None:
        """More texts, as far as time and tokens go."""
        path, args = self._session.folder / TEXTS, self._args
        there = read_texts(path)
        written = {text.number for text in there}
        todo = {n: prompt for n, prompt in enumerate(ids) if n not in written}
        num_tokens = sum(len(text.token_ids) - text.num_prompt_tokens for text in there)
        with tqdm(desc="Writing", total=args.num_tokens, initial=num_tokens, unit="token", disable=None) as bar:
            for text in self_text.write(
                self._engine, todo, eos_token_ids=eos_token_ids, max_tokens=args.max_tokens, concurrency=CONCURRENCY,
                seed=args.seed,
            ):  # fmt: skip
                append_text(path, text)
                bar.update(len(text.token_ids) - text.num_prompt_tokens)
                if bar.n >= args.num_tokens or self.time_left() < 1.0 - TEXT_SHARE:
                    break
        self._session.save(self._spent_s)

    def learn(self, trainer: Trainer, examples: list[Example]) -> None:
        self._session.restore(trainer)
        with tqdm(desc="Learning", total=round(self._total_s), initial=round(self._spent_s), unit="s",
                  disable=None) as bar:  # fmt: skip

            def told(loss: float) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}, step {trainer.num_steps}", refresh=False)
                bar.update(min(round(self._spent_s), bar.total) - bar.n)
                if time.monotonic() - self._saved_at > SAVE_EVERY_S:
                    self._session.save(self._spent_s, trainer)
                    self._saved_at = time.monotonic()

            trainer.run(examples, self.time_left, told)
        self._session.save(self._spent_s, trainer)


def new_head(
    method: str, config: ModelConfig, draft_vocab_size: int, places: int
) -> tuple[EagleConfig | MedusaConfig, tuple[int, ...]]:
    """And the layers that it learns from: what it reads, and what its labels follow from."""
    if method == "medusa":
        medusa = MedusaConfig(config.hidden_size, config.vocab_size, draft_vocab_size, places,
                              last_layer(config.num_layers))  # fmt: skip
        return medusa, medusa.tap_layers
    eagle = eagle_like("eagle3" if method == "eagle3" else "eagle", config, draft_vocab_size)
    layers = (*eagle.tap_layers, *last_layer(config.num_layers)) if eagle.is_fused else eagle.tap_layers
    return eagle, layers


def beginning_of(args: argparse.Namespace, model: Path, config: ModelConfig) -> Beginning | None:
    if not args.init_from:
        return None
    folder = packaged_heads(model) if args.init_from == "packaged" else Path(args.init_from)
    try:
        return begin_with(folder, args.method, config)
    except (ValueError, OSError) as e:
        raise Refused(f"--init-from: {e}") from None


def target_of(source: WeightSource, token_ids: torch.Tensor, device: torch.device) -> Target:
    config = source.config
    embedding = torch.empty(source.shapes["embedding.weight"])
    source.read_into("embedding.weight", embedding)
    head = embedding
    if "head.weight" in source.shapes:
        head = torch.empty(source.shapes["head.weight"])
        source.read_into("head.weight", head)
    final_norm = torch.empty(source.shapes["final_norm.weight"])
    source.read_into("final_norm.weight", final_norm)
    cos, signed_sin = rope_tables(config, config.max_position_embeddings)
    angles = cos.to(device), signed_sin.to(device)
    return Target(embedding, head[token_ids].to(device), token_ids, angles, final_norm)


def module_of(config: EagleConfig | MedusaConfig, target: Target, examples: list[Example]) -> nn.Module:
    if isinstance(config, MedusaConfig):
        return MedusaHeads(config, target.lm_head)
    head = EagleHead(config, target.lm_head, target.final_norm)
    rows = torch.cat([e.rows[:, : len(config.tap_layers)].float().flatten(1) for e in examples[:SCALED_BY]])
    if not config.is_fused:
        ids = [token for e in examples[:SCALED_BY] for token in e.text.token_ids]
        rows = torch.cat((target.embedding[ids], rows), dim=1)
    head.get_buffer("scale").copy_(1.0 / rows.square().mean(0).sqrt().clamp_min(1e-3))
    return head


def train(args: argparse.Namespace) -> list[float]:
    """Held-out acceptance by place."""
    model = model_source.resolve(args.model, settings.load(CommonSettings).cache_dir)
    source = open_source(model.path)
    if source.config.embedding_scale != 1.0 or source.config.logit_scale != 1.0 or source.config.logit_softcap:
        raise ConfigError(f"{model.name} scales its embedding or its logits, which heads do not learn")
    size = source.config.vocab_size if args.method == "eagle" else min(args.draft_vocab_size, source.config.vocab_size)
    config, layers = new_head(args.method, source.config, size, args.places)
    beginning = beginning_of(args, model.path, source.config)
    if beginning is not None:
        config, layers, size = beginning.config, beginning.layers, len(beginning.token_ids)
    threads = args.threads or settings.load(WorkerSettings).threads or num_cores()
    run, examples = gathered(args, model.path, source, layers, size, threads)
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    written = [e.text.token_ids[e.text.num_prompt_tokens :] for e in examples]
    token_ids = beginning.token_ids if beginning else frequent_tokens(written, size, source.config.vocab_size)
    target = target_of(source, token_ids, device)
    torch.manual_seed(args.seed)
    head = module_of(config, target, examples)
    if beginning is not None:
        beginning.give(head)
    head = head.to(device)
    batcher = Batcher(target, device)
    trainer = Trainer(head, target, batcher, args.places, args.seed)
    held_out = [e for e in examples if e.text.number % HELD_OUT == 0]  # greedy ones, see TEMPERATURES
    run.learn(trainer, [e for e in examples if e.text.number % HELD_OUT])
    shares = measure(head, held_out, target, batcher)
    notes = {"base_model": model.name, "method": args.method, "steps": str(trainer.num_steps), "seed": str(args.seed)}
    publish(head.cpu(), target.token_ids, args.output, args.dtype, notes)
    return shares


def gathered(
    args: argparse.Namespace, model: Path, source: WeightSource, layers: tuple[int, ...], size: int, threads: int
) -> tuple[Run, list[Example]]:
    """Texts, as far as there are some yet, with what these layers read on them."""
    ids, eos_token_ids = prompt_ids(model, args.data, args.seed)
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    recipe = Recipe(source.identity, args.method, size, digest, args.max_tokens, args.places, args.seed,
                    args.init_from)  # fmt: skip
    session = Session(args.output / "training", recipe)
    cache_dir = settings.load(CommonSettings).cache_dir
    engine = load_engine(args.engine, model, cache_dir, num_threads=threads, kv_cache_bytes=KV_CACHE_BYTES)
    if not isinstance(engine, NativeEngine | TorchEngine):
        raise ConfigError("what layers read is known of engines on a CPU alone")
    run = Run(args, session, engine)
    if run.time_left() > 1.0 - TEXT_SHARE:
        run.write(ids, eos_token_ids)
    texts = [t for t in read_texts(session.folder / TEXTS) if len(t.token_ids) > 2]
    if len(texts) < HELD_OUT:
        raise Refused(f"--hours: the model has written {len(texts)} texts, at least {HELD_OUT} are needed")
    num_tokens, size = sum(len(t.token_ids) for t in texts), source.config.hidden_size
    with tqdm(desc="Computing what layers read", total=num_tokens, unit="token", disable=None) as bar:
        return run, teach(engine, texts, layers, size, session.folder / ROWS, bar.update)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        shares = train(args)
    except (ValueError, OSError, MemoryError) as e:  # of settings, files and models: sentences all
        sys.stderr.write(f"headrace train-heads: {e}\n")
        return 1
    lines = [f"  {place}: {share:.3f}" for place, share in enumerate(shares, 1)]
    sys.stdout.write("\n".join(["held-out acceptance by place, where all before were right:", *lines]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
