"""The worker's metrics, all of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gpu_worker.engine_thread import EngineLoop
from services.gpu_worker.speculative.auto import AutoSpeculator
from services.gpu_worker.speculative.fleet import Fleet
from services.gpu_worker.speculative.model_speculator import ModelSpeculator
from services.gpu_worker.speculative.speculator import Speculator
from shared.metrics import ProcessMetrics

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class WorkerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._process = ProcessMetrics(self.registry)
        self.step_seconds = self._histogram("headrace_step_seconds", "Duration of the engine's steps")
        self.commit_seconds = self._histogram("headrace_commit_seconds", "Round trips of commits")
        self._running = Gauge("headrace_num_sequences_running", "Sequences that it runs", registry=self.registry)
        self._starved = Gauge("headrace_num_sequences_starved", "Those that lack a block", registry=self.registry)
        self._speed = Gauge("headrace_tokens_per_second", "Tokens drawn while it steps", registry=self.registry)
        self._blocks = Gauge("headrace_worker_kv_blocks", "Blocks of its pool", ["state"], registry=self.registry)
        self._totals = {
            name: Counter(f"headrace_{name}", text, registry=self.registry)
            for name, text in (
                ("steps", "Steps of the engine"),
                ("step_gaps", "Of the steps that overlap, those that began when the one before had ended"),
                ("generation_tokens", "Tokens drawn that count for an answer"),
                ("prefill_tokens", "Tokens computed without being drawn from, and last prompt tokens"),
                ("cached_prompt_tokens", "Prompt tokens that need no computing"),
            )
        }
        self._events = Counter(
            "headrace_worker_events", "Ends by reason, and what was fenced or refused", ["event"],
            registry=self.registry,
        )  # fmt: skip
        self._drafts = {
            name: Counter(f"headrace_spec_decode_{name}", text, ["method", *more], registry=self.registry)
            for name, text, more in (
                ("num_drafts", "Times that a sequence had drafts in a step", ()),
                ("num_draft_tokens", "Tokens that were drafted", ()),
                ("num_accepted_tokens", "Drafts that were right", ()),
                ("num_accepted_tokens_per_pos", "Drafts that were right, by their place in a draft", ("position",)),
            )
        }
        self._fleet = {
            name: Gauge(f"headrace_worker_fleet_{name}", text, registry=self.registry)
            for name, text in (
                ("tenants", "Tenants of whose answers it has statistics"),
                ("entries", "Entries of those: what has followed which tokens"),
                ("bytes", "Memory of those"),
            )
        }
        self._told = Counter("headrace_fleet_answers", "Answers for stores", ["state"], registry=self.registry)
        self._time_saved = Gauge(
            "headrace_spec_decode_time_saved_seconds",
            "What steps without drafts would have taken longer for the same tokens, guessing included; below 0: a loss",
            ["method"], registry=self.registry,
        )  # fmt: skip
        self._seen: dict[str, float] = {}

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)

    def observe(self, loop: EngineLoop) -> None:
        self._process.observe()
        with loop.lock:
            running = loop.running
            counts = dict(running.counts)
            speculator = running.drafting.drafter
            if isinstance(speculator, AutoSpeculator | Speculator | ModelSpeculator):
                self._observe_drafts(speculator)
                if speculator.fleet is not None:
                    self._observe_fleet(speculator.fleet)
            totals: dict[str, float] = {
                "steps": loop.num_steps,
                "step_gaps": loop.num_gaps,
                "generation_tokens": loop.num_drawn,
                "prefill_tokens": loop.num_prefilled,
                "cached_prompt_tokens": counts.pop("cached_tokens", 0),
            }
            self._running.set(len(running.sequences))
            self._starved.set(len(running.starved))
            states = {
                "total": running.info.num_blocks,
                "held": running.blocks.num_held,
                "spare": len(running.blocks.spares),
                "sealed": len(running.sealed),
            }
        for state, number in states.items():
            self._blocks.labels(state).set(number)
        self._speed.set(loop.cost.tokens_per_second)
        for name, total in totals.items():
            self._totals[name].inc(self._new(name, total))
        for event, count in counts.items():
            self._events.labels(event).inc(self._new(f"event {event}", count))

    def _observe_drafts(self, speculator: AutoSpeculator | Speculator | ModelSpeculator) -> None:
        for method, counts in speculator.counts.items():
            self._time_saved.labels(method).set(counts.saved_s)
            for name, total in (
                ("num_drafts", counts.num_drafts),
                ("num_draft_tokens", counts.num_draft_tokens),
                ("num_accepted_tokens", counts.accepted.total()),
            ):
                self._drafts[name].labels(method).inc(self._new(f"{method} {name}", total))
            per_position = self._drafts["num_accepted_tokens_per_pos"]
            for position, total in counts.accepted.items():
                per_position.labels(method, position).inc(self._new(f"{method} accepted at {position}", total))

    def _observe_fleet(self, fleet: Fleet) -> None:
        tables = fleet.tables
        self._fleet["tenants"].set(len(tables))
        self._fleet["entries"].set(sum(t.num_entries for t in tables))
        self._fleet["bytes"].set(sum(t.num_bytes for t in tables))
        left_out = fleet.num_ended - fleet.num_told - fleet.num_waiting
        for state, total in (("told", fleet.num_told), ("left_out", left_out)):
            self._told.labels(state).inc(self._new(f"answers {state}", total))

    def _new(self, name: str, total: float) -> float:
        increment = total - self._seen.get(name, 0.0)
        self._seen[name] = total
        return max(0.0, increment)
