"""What speculation gains and costs: the engine with and without it in turns, in one process, on texts of several kinds.

    python -m tests.bench.speculation [--config JSON] [--rounds N] [--concurrency 1,16] [--kinds edit,random]

A line of JSON for each kind and number of sequences: tokens a second without, and the ratio with, of the same round;
the median, the smallest and the largest; and that of processor time, which other work on the machine changes less. The
tokens are compared too. Default model, native engine, greedy.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from services.gateway.tokenization import Tokenizer
from services.gpu_worker.admission import Admission
from services.gpu_worker.composer import Budget
from services.gpu_worker.drafters import make_drafter
from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.engines import load_engine
from services.gpu_worker.heads_loading import heads_of
from services.gpu_worker.native_engine import NativeEngine
from services.gpu_worker.probe import measure
from services.gpu_worker.running_set import Change, RunningSet
from services.gpu_worker.speculative.head_proposer import HeadProposer
from shared import model_source
from shared.cores import leaves_one_free, num_cores
from shared.model_source import default_cache_dir
from shared.protocol import SamplingParams
from shared.settings import WorkerSettings
from shared.speculative_config import SpeculativeConfig, parse
from shared.worker_protocol import Admit, TakeOver

DATA = Path(__file__).parent / "data" / "speculation.json"
NUM_OUTPUT = 160
OTHER_TOKENS = 150  # of a prompt of random tokens


class Side:
    """One of the two: a running set of its own. heads: of the engine, where the method has some."""

    def __init__(
        self, engine: NativeEngine, config: SpeculativeConfig | None, temperature: float, stops: tuple[int, ...],
        heads: HeadProposer | None = None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._stops = stops
        self._temperature = temperature
        self._speculator = make_drafter(config, engine, heads, float("inf"))
        self._cost = measure(engine)

    def run(self, prompts: list[list[int]], concurrency: int) -> tuple[float, float, list[list[int]]]:
        """Seconds, those of the processors, and what each has drawn."""
        running = RunningSet(self._engine.info, Budget(512, 64, 512), lambda p, v: None, self._speculator,
                             enable_prefix_caching=False)  # fmt: skip
        loop = EngineLoop(self._engine, running, cost=self._cost, overlap=leaves_one_free(num_cores()))
        running.apply(Change("run", 1, TakeOver(term=1, inbox="")))
        waiting, size, answers = list(enumerate(prompts)), self._engine.info.block_size, {}
        num_blocks = -(-(max(map(len, prompts)) + NUM_OUTPUT) // size)
        places = list(range(concurrency))
        holders: dict[str, int] = {}
        started, cpu_started = time.perf_counter(), time.process_time()
        while waiting or running.sequences:
            while waiting and places:
                number, prompt = waiting.pop(0)
                sid, place = f"r{number}.0", places.pop()
                holders[sid] = place
                params = SamplingParams(
                    max_tokens=NUM_OUTPUT, temperature=self._temperature, seed=number, stop_token_ids=self._stops
                )
                admit = Admit(
                    sid=sid, epoch=1, pool_term=0, cached_length=0,
                    block_ids=tuple(range(place * num_blocks, (place + 1) * num_blocks)),
                )  # fmt: skip
                running.apply(Change("run", 1, admit, Admission(params, prompt, bytes(32), [], None)))
            before = list(running.sequences.values())
            loop.step_once()
            for seq in before:
                if seq.sid not in running.sequences:
                    answers[seq.sid] = seq.token_ids[seq.num_prompt_tokens :]
                    places.append(holders[seq.sid])
            running.outbox.acknowledged(running.outbox.carry(set()))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        return seconds, cpu_s, [answers[f"r{n}.0"] for n in range(len(prompts))]

    def drafted(self) -> tuple[int, int]:
        counts = self._speculator.counts.values() if self._speculator else ()
        return sum(c.num_draft_tokens for c in counts), sum(c.accepted.total() for c in counts)


def prompts_of(kind: str, tokenizer: Tokenizer, number: int, rng: random.Random) -> list[list[int]]:
    if kind == "random":
        vocab_size = tokenizer.vocab_size
        return [[rng.randrange(vocab_size // 2, vocab_size) for _ in range(OTHER_TOKENS)] for _ in range(number)]
    texts = json.loads(DATA.read_text())[kind]
    return [tokenizer.encode(texts[n % len(texts)], add_special_tokens=True) for n in range(number)]


def loaded(model: Path) -> NativeEngine:
    engine = load_engine("native", model, default_cache_dir(), kv_cache_bytes=2 << 30, block_size=8,
                         num_threads=num_cores())  # fmt: skip
    assert isinstance(engine, NativeEngine)
    return engine


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--config", default='{"method": "suffix"}')
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--concurrency", default="1")
    ap.add_argument("--kinds", default="edit,extract,code,chat,random")
    ap.add_argument("--num", type=int, default=0, help="prompts a round; 2, or as many as run at once")
    ap.add_argument("--temperature", type=float, default=0.0)
    args = ap.parse_args()
    source = model_source.resolve("smollm2-135m-instruct", default_cache_dir())
    tokenizer = Tokenizer.from_source(source)
    engine, config = loaded(source.path), parse(args.config, is_native=True)
    with_heads = heads_of(WorkerSettings(speculative_config=args.config), source.path, default_cache_dir())
    other = loaded(source.path) if with_heads else engine
    heads = with_heads.load(other) if with_heads else None
    stops = tuple(tokenizer.eos_token_ids)
    for concurrency in map(int, args.concurrency.split(",")):
        for kind in args.kinds.split(","):
            without = Side(engine, None, args.temperature, stops)
            with_it = Side(other, config, args.temperature, stops, heads)
            prompts = prompts_of(kind, tokenizer, args.num or max(2, concurrency), random.Random(1))
            rates, ratios, cpu_ratios, same = [], [], [], True
            for _ in range(args.rounds):
                seconds, cpu_s, want = without.run(prompts, concurrency)
                seconds_with, cpu_s_with, got = with_it.run(prompts, concurrency)
                rates.append(sum(map(len, want)) / seconds)
                ratios.append(seconds / seconds_with)
                cpu_ratios.append(cpu_s / cpu_s_with)
                same = same and got == want
            drafted, accepted = with_it.drafted()
            line = {
                "kind": kind, "concurrency": concurrency, "tok_s_without": round(statistics.median(rates), 1),
                "ratio": round(statistics.median(ratios), 3), "from": round(min(ratios), 3),
                "to": round(max(ratios), 3),
                "cpu_ratio": round(statistics.median(cpu_ratios), 3),
                "drafted": drafted, "accepted": accepted, "same_tokens": same,
            }  # fmt: skip
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
