"""Metrics of the Valkey tier, and the plain numbers of them that `stats()` shows.

Invariant: metric names, labels and their values are stated here only.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ValkeyMetrics:
    """Every metric of the tier. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._operations = Counter(
            "kvpool_valkey_operations_total",
            "Operations on blocks. op: get, set, exists, unlink. result: ok; miss; incomplete (one of two parts was "
            "evicted); bad (not the block it should be); present (nothing to write); failed; cancelled.",
            ("op", "result"),
            registry=registry,
        )
        self._bytes = Counter(
            "kvpool_valkey_bytes_total",
            "Value bytes moved. direction: read, written.",
            ("direction",),
            registry=registry,
        )
        self._seconds = Histogram(
            "kvpool_valkey_operation_seconds",
            "Time from sending a batch of requests to its last reply. op: get, set, exists, expire, unlink, probe.",
            ("op",),
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self._bad_values = Counter(
            "kvpool_valkey_bad_values_total",
            "Values read that were not the block they should be; deleted unless the tier is read-only. reason: what of "
            "the header or the checksums was wrong.",
            ("reason",),
            registry=registry,
        )
        self._dropped = Counter(
            "kvpool_valkey_writes_dropped_total",
            "Blocks that were not written. reason: queue_full, breaker_open, refused (the shard is full or forbids), "
            "not_connected, stopped.",
            ("reason",),
            registry=registry,
        )
        self._failures = Counter(
            "kvpool_valkey_failures_total",
            "Failed exchanges with a shard by what went wrong.",
            ("reason",),
            registry=registry,
        )
        self._breaker_open = Gauge(
            "kvpool_valkey_breaker_open",
            "1 while a shard is left alone after failures, else 0.",
            ("shard",),
            registry=registry,
        )
        self._connected = Gauge(
            "kvpool_valkey_connected", "1 when at least one shard is usable, else 0.", registry=registry
        )
        self.write_queue_bytes = Gauge(
            "kvpool_valkey_write_queue_bytes",
            "Payload waiting to be written (an estimate until a block of its group was moved).",
            registry=registry,
        )
        self._lock = threading.Lock()
        self._bad_tally: Tally[str] = Tally()
        self._dropped_tally: Tally[str] = Tally()

    def operation(self, op: str, result: str, count: int = 1) -> None:
        """Count operations."""
        if count:
            self._operations.labels(op, result).inc(count)

    def moved(self, direction: str, count: int) -> None:
        """Count value bytes, "read" or "written"."""
        self._bytes.labels(direction).inc(count)

    def took(self, op: str, seconds: float) -> None:
        """Observe the duration of a batch."""
        self._seconds.labels(op).observe(seconds)

    def bad_value(self, reason: str) -> None:
        """Count a value that was not the block it should be."""
        self._bad_values.labels(reason).inc()
        with self._lock:
            self._bad_tally[reason] += 1

    def dropped(self, reason: str, count: int = 1) -> None:
        """Count blocks that were not written."""
        if count:
            self._dropped.labels(reason).inc(count)
            with self._lock:
                self._dropped_tally[reason] += count

    def failure(self, reason: str) -> None:
        """Count a failed exchange."""
        self._failures.labels(reason).inc()

    def breaker(self, shard: str, is_open: bool) -> None:
        """Show a shard's breaker."""
        self._breaker_open.labels(shard).set(is_open)

    def forget_shard(self, shard: str) -> None:
        """A shard is gone: so is its label."""
        self._breaker_open.remove(shard)

    def connected(self, is_connected: bool) -> None:
        """Show whether the tier is of use."""
        self._connected.set(is_connected)

    def tallies(self) -> tuple[dict[str, int], dict[str, int]]:
        """(bad values by reason, dropped writes by reason)."""
        with self._lock:
            return dict(self._bad_tally), dict(self._dropped_tally)
