"""Pools and settings for tests of the operator."""

from __future__ import annotations

from typing import Any

from kvpool_operator.plan import PlanInputs
from kvpool_operator.plan.secrets import Generated
from kvpool_operator.pool import Pool, parse_pool
from kvpool_operator.settings import Settings

UID = "11111111-2222-3333-4444-555555555555"
SETTINGS = Settings(
    namespace="kvpool-system", identity="kvpool-operator-0", image="kvpool:test", valkey_image="valkey:test"
)
GENERATED = Generated(
    token="t" * 20, operator_password="o" * 20, agent_password="a" * 20, replication_password="r" * 20
)
MANAGED = {"managed": {"shards": 3, "memoryPerShard": "1Gi"}}
EXTERNAL = {
    "external": {
        "endpoints": ["valkey:6379"],
        "keyPrefix": "",
        "authSecretRef": {"name": "login"},
        "deletionPolicy": "Purge",
    }
}


def manifest(*, metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A KVCachePool as the API server holds it."""
    meta = {"namespace": "inference", "name": "chat", "uid": UID, "generation": 3, **(metadata or {})}
    defaults: dict[str, Any] = {"agent": {"nodeSelector": {"gpu": "yes"}}, "ram": {"capacityPerNode": "1Gi"}}
    return {"apiVersion": "kvpool.io/v1alpha1", "kind": "KVCachePool", "metadata": meta, "spec": {**defaults, **spec}}


def make_pool(*, metadata: dict[str, Any] | None = None, **spec: Any) -> Pool:
    """The same, parsed."""
    return parse_pool(manifest(metadata=metadata, **spec))


def inputs(*, allowed: tuple[str, ...] = ("inference",), replicas: int = 3) -> PlanInputs:
    """What planning needs."""
    return PlanInputs(allowed=allowed, generated=GENERATED, valkey_replicas=replicas)
