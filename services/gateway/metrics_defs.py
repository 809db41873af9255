"""The gateway's metrics, all of them; names follow vLLM's with our prefix."""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.http_server import Guard
from shared.metrics import ProcessMetrics

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class GatewayMetrics:
    """registry is this gateway's own, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self.http_requests = Counter(
            "headrace_http_requests", "HTTP requests by route and status", ["route", "status"], registry=registry
        )
        self.finished = Counter(
            "headrace_request_success", "Choices that ended, by reason", ["finished_reason"], registry=registry
        )
        self.failed = Counter("headrace_request_failure", "Requests that failed, by code", ["code"], registry=registry)
        self.disconnected = Counter("headrace_client_disconnects", "Clients gone before the end", registry=registry)
        self.attached = Counter("headrace_attachments", "Answers taken up again", registry=registry)
        self.queue_full = Counter("headrace_queue_full", "Requests refused with 429", registry=registry)
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Tokens in prompts", registry=registry)
        self.cached_tokens = Counter("headrace_prompt_tokens_cached", "Of these, from the cache", registry=registry)
        self.generation_tokens = Counter("headrace_generation_tokens", "Tokens shown and counted", registry=registry)
        self.first_token_s = histogram("headrace_time_to_first_token_seconds", "From request to first token", SECONDS)
        self.inter_token_s = histogram(
            "headrace_inter_token_latency_seconds", "Time between events of a choice, by its tokens", TOKEN_SECONDS
        )
        self.end_to_end_s = histogram("headrace_e2e_request_latency_seconds", "From request to last token", SECONDS)
        self.prompt_length = histogram("headrace_request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.open_requests = Gauge("headrace_open_requests", "Requests being answered", registry=registry)
        self.process = ProcessMetrics(registry)
        self._connections = {
            name: Counter(f"headrace_{name}", text, registry=registry)
            for name, text in (
                ("slow_clients_cut", "Connections whose client did not take what was sent"),
                ("connections_refused", "Connections beyond the limit, answered with 503"),
            )
        }
        self._seen: Counts[str] = Counts()

    def observe_connections(self, guard: Guard) -> None:
        totals = {"slow_clients_cut": guard.num_cut, "connections_refused": guard.num_refused}
        for name, total in totals.items():
            self._connections[name].inc(total - self._seen[name])
            self._seen[name] = total
