"""Metrics of the webhook."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class WebhookMetrics:
    """One set of them; tests make their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reviews = Counter(
            "kvpool_webhook_reviews",
            "Pods that opted in, by what became of them (injected, already, skipped, ignored, failed) and why",
            ["outcome", "reason"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvpool_webhook_review_seconds", "Time to answer a review", buckets=SECONDS_BUCKETS, registry=registry
        )
        self.certificate_expires = Gauge(
            "kvpool_webhook_certificate_expiry_timestamp_seconds",
            "When the serving certificate expires, in seconds since 1970",
            registry=registry,
        )
