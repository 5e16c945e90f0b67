"""vLLM's OffloadingSpec: makes the scheduler side and the worker side. Named in the injected `kv_connector_extra_config`.

vLLM hands a spec only a translated configuration, so the connector passes what else is needed through `Wiring`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvpool_vllm import metrics


class Wiring:
    """What the connector being constructed gives to its spec; one connector is made at a time in a process."""

    manager: Callable[[], OffloadingManager] | None = None
    worker: Callable[[CanonicalKVCaches], OffloadingWorker] | None = None


class KvpoolSpec(OffloadingSpec):
    """Offloading to the node's kvpool agent."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Metrics of the connector, for the API server process; the same whatever is configured."""
        del extra_config
        return metrics.DEFINITIONS

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._make_manager = Wiring.manager
        self._make_worker = Wiring.worker

    def get_manager(self) -> OffloadingManager:
        """The scheduler side."""
        assert self._make_manager is not None
        return self._make_manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker side."""
        assert self._make_worker is not None
        return self._make_worker(kv_caches)
