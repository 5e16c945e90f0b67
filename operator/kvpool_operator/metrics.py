"""The operator's metrics.

Invariant: labels are of a few fixed words; no pool, no pod.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OperatorMetrics:
    """Of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reconciles = Counter(
            "kvpool_operator_reconciles",
            "Looks at pools, by how they ended: ok, retry (the API server was not there), error (a fault of ours)",
            ["result"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvpool_operator_reconcile_seconds", "Time of a look at a pool", buckets=BUCKETS, registry=registry
        )
        self.leading = Gauge("kvpool_operator_leading", "1 on the replica that leads", registry=registry)
        self.waiting = Gauge("kvpool_operator_waiting_pools", "Pools that wait for a look", registry=registry)
        self.pools = Gauge("kvpool_operator_pools", "Pools, as of the last resync", registry=registry)
