"""The router's Prometheus metrics.

Invariant: every metric is declared here, with its unit in its name; labels have few values (never a prompt or tenant).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ROUTE_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """All metrics over one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "kvpool_router_requests",
            "Requests answered, by why they went where they went and by HTTP status (0: the client left first)",
            ("reason", "code"),
            registry=registry,
        )
        self.route_seconds = Histogram(
            "kvpool_router_route_seconds",
            "Time from a request's whole body to the choice of its endpoint, tokenization included",
            buckets=_ROUTE_BUCKETS,
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "kvpool_router_first_byte_seconds",
            "Time from a request's whole body to the first byte of its answer's body",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.prompt_blocks = Counter(
            "kvpool_router_prompt_blocks",
            "Full blocks of the prompts that were routed with their tokens known",
            registry=registry,
        )
        self.expected_blocks = Counter(
            "kvpool_router_expected_blocks",
            "Blocks that the chosen endpoint was expected to have or load, by tier",
            ("tier",),
            registry=registry,
        )
        self.retries = Counter(
            "kvpool_router_retries",
            "Requests passed on to another endpoint before their first byte, by what the first one did",
            ("cause",),
            registry=registry,
        )
        self.broken_answers = Counter(
            "kvpool_router_broken_answers",
            "Answers that an engine broke off after their first byte; the client's connection was closed",
            registry=registry,
        )
        self.tokenizations = Counter(
            "kvpool_router_tokenizations",
            "Prompts by whether they could be routed by prefix: known, no-tokens, unhashable, stale-index",
            ("result",),
            registry=registry,
        )
        self.resyncs = Counter(
            "kvpool_router_resyncs",
            "Event streams that ended, by agent and reason; each is subscribed to again",
            ("agent", "reason"),
            registry=registry,
        )
        self.agent_in_step = Gauge(
            "kvpool_router_agent_in_step",
            "1 while the agent's event stream is complete and alive",
            ("agent",),
            registry=registry,
        )
        self.pod_watches_failing = Gauge(
            "kvpool_router_pod_watches_failing",
            "Namespaces whose pods cannot be watched now; endpoints there are as last known",
            registry=registry,
        )
        self.index_entries = Gauge("kvpool_router_index_entries", "Blocks in the prefix index", registry=registry)
        self.index_evicted = Counter(
            "kvpool_router_index_evicted",
            "Blocks dropped from the index because it was full",
            registry=registry,
        )
        self.endpoint_up = Gauge(
            "kvpool_router_endpoint_up", "1 while the endpoint is ready", ("endpoint",), registry=registry
        )
        self.endpoint_silent = Gauge(
            "kvpool_router_endpoint_silent",
            "1 while the endpoint's last probes all went unanswered: it gets requests only while no other is up",
            ("endpoint",),
            registry=registry,
        )
        self.queued_tokens = Gauge(
            "kvpool_router_queued_tokens",
            "Prompt tokens in flight whose answer has not begun, by target",
            ("target",),
            registry=registry,
        )
        self.running_requests = Gauge(
            "kvpool_router_running_requests", "Requests in flight, by target", ("target",), registry=registry
        )
        self.prefill_rate = Gauge(
            "kvpool_router_prefill_tokens_per_second",
            "Measured prefill rate of a target, 0 while not measured",
            ("target",),
            registry=registry,
        )
