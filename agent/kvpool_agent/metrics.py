"""The agent's Prometheus metrics, and the plain counters that /v1/stats repeats.

Invariant: every metric of the agent is declared here, once, with its unit in the name and a help text.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LOOKUP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
"""Seconds: RAM answers lie in the first three, fetches from Valkey in the rest."""


class AgentMetrics:
    """All metrics of one agent process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._declare_arena(registry)
        self._declare_lookups(registry)
        self._declare_stores(registry)
        self._declare_peers(registry)

    def _declare_arena(self, registry: CollectorRegistry) -> None:
        self.arena_bytes = Gauge("kvpool_agent_arena_bytes", "Size of the arena in bytes", registry=registry)
        self.arena_prefaulted_bytes = Gauge(
            "kvpool_agent_arena_prefaulted_bytes", "Bytes of the arena that have their memory by now", registry=registry
        )
        self.arena_state = Gauge(
            "kvpool_agent_arena_state",
            "1 for the arena's current state: waiting (for lock or holder), pending (no room yet), prefaulting, ready",
            ["state"], registry=registry,
        )  # fmt: skip
        self.arena_used_bytes = Gauge("kvpool_agent_arena_used_bytes", "Bytes of the arena in slots", registry=registry)
        self.slots = Gauge("kvpool_agent_slots", "Slots in use by state", ["state"], registry=registry)
        self.leases = Gauge("kvpool_agent_leases", "Requests that hold a lease", registry=registry)
        self.evictions = Counter("kvpool_agent_evictions", "Blocks evicted from the arena", registry=registry)
        self.takeovers = Counter(
            "kvpool_agent_takeovers", "Starts of this agent by what became of the arena", ["result"], registry=registry
        )
        self.taken_over_blocks = Counter(
            "kvpool_agent_taken_over_blocks", "Blocks of the former agent by fate", ["fate"], registry=registry
        )
        self.checksum_failures = Counter(
            "kvpool_agent_checksum_failures", "Payloads in the arena that were not what they should be", ["where"],
            registry=registry,
        )  # fmt: skip
        self.checksummed_bytes = Counter(
            "kvpool_agent_checksummed_bytes", "Bytes of payload run through xxh3-64", registry=registry
        )

    def _declare_lookups(self, registry: CollectorRegistry) -> None:
        self.lookups = Counter("kvpool_agent_lookups", "Prefetches answered", ["result"], registry=registry)
        self.lookup_blocks = Counter(
            "kvpool_agent_lookup_blocks",
            "Blocks asked for in Prefetches, by where they lay when it arrived (local: on the GPU, none: a miss)",
            ["tier"], registry=registry,
        )  # fmt: skip
        self.lookup_seconds = Histogram(
            "kvpool_agent_lookup_seconds", "Time to the final verdict of a Prefetch", buckets=LOOKUP_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.fetched_blocks = Counter(
            "kvpool_agent_fetched_blocks", "Blocks asked of Valkey by outcome", ["outcome"], registry=registry
        )
        self.fetches_declined = Counter(
            "kvpool_agent_fetches_declined", "Fetches not begun or given up since recomputing is quicker", ["when"],
            registry=registry,
        )  # fmt: skip
        self.fetch_latency_seconds = Gauge(
            "kvpool_agent_fetch_latency_seconds",
            "Moving average of the time to a fetch's first block",
            registry=registry,
        )
        self.fetch_bytes_per_second = Gauge(
            "kvpool_agent_fetch_bytes_per_second", "Moving average of a fetch's throughput", registry=registry
        )
        self.fetch_estimate_seconds = Gauge(
            "kvpool_agent_fetch_estimate_seconds", "Expected time of the last fetch considered", registry=registry
        )
        self.recompute_estimate_seconds = Gauge(
            "kvpool_agent_recompute_estimate_seconds", "Expected time to recompute the same tokens", registry=registry
        )

    def _declare_stores(self, registry: CollectorRegistry) -> None:
        self.reserved_blocks = Counter(
            "kvpool_agent_reserved_blocks", "Keys offered for storing by answer", ["answer"], registry=registry
        )
        self.stores = Counter("kvpool_agent_stores", "Store jobs that ended, by result", ["result"], registry=registry)
        self.stored_blocks = Counter("kvpool_agent_stored_blocks", "Blocks that became readable", registry=registry)
        self.valkey_writes = Counter(
            "kvpool_agent_valkey_writes", "Blocks offered to the Valkey tier by result", ["result"], registry=registry
        )

    def _declare_peers(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge("kvpool_agent_connections", "Open connections by role", ["role"], registry=registry)
        self.protocol_errors = Counter(
            "kvpool_agent_protocol_errors", "Connections closed since the peer broke the protocol", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.authentications = Counter(
            "kvpool_agent_authentications", "Greetings by outcome: admitted, or the code of the refusal", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.token_review_seconds = Histogram(
            "kvpool_agent_token_review_seconds", "Time that the API server took for a TokenReview, or to fail",
            buckets=LOOKUP_BUCKETS, registry=registry,
        )  # fmt: skip
        self.standing_by = Gauge(
            "kvpool_agent_standing_by", "Engine processes that wait for the arena, by whether they map a former one",
            ["mapped"], registry=registry,
        )  # fmt: skip
        self.engines = Gauge(
            "kvpool_agent_engines", "Engines connected by state of their domain", ["state"], registry=registry
        )
        self.subscribers = Gauge("kvpool_agent_event_subscribers", "Open event streams", registry=registry)
        self.subscribers_dropped = Counter(
            "kvpool_agent_event_subscribers_dropped", "Event streams closed since they were not read", registry=registry
        )
        self.holder_connected = Gauge(
            "kvpool_agent_holder_connected", "1 while the holder keeps our arena", registry=registry
        )
        self.valkey_state = Gauge(
            "kvpool_agent_valkey_state", "1 for the Valkey tier's current state", ["state"], registry=registry
        )
        self.loop_errors = Counter(
            "kvpool_agent_internal_errors", "Faults of our own that were caught at the top of a loop", ["where"],
            registry=registry,
        )  # fmt: skip


def counter_values(registry: CollectorRegistry) -> dict[str, float]:
    """Every counter of the agent as {"name{label=value}": count}, for /v1/stats."""
    values: dict[str, float] = {}
    for family in registry.collect():
        if family.type != "counter" or not family.name.startswith("kvpool_"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_total"):
                labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values
