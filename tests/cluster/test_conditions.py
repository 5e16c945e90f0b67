"""What a pool cannot have is named in its conditions, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.external_valkey import basic_auth, external_valkey
from tests.cluster.installation import condition, pool_manifest, read_pool, wait_pool_ready
from tests.cluster.waiting import wait_for

CONDITION_SECONDS = 90.0
REMEDIED_SECONDS = 180.0
"""A kubelet tries a volume whose Secret was missing again after up to two minutes."""
SMALL = "64Mi"


def expect(cluster: Cluster, namespace: str, kind: str, reason: str, *parts: str) -> None:
    """Wait for a condition that is not True for this reason, and whose message has these parts."""
    seen: dict[str, Any] = {}

    def found() -> bool:
        seen.clear()
        seen.update(condition(read_pool(cluster, "chat", namespace), kind))
        return seen.get("status") == "False" and seen["reason"] == reason

    wait_for(found, seconds=CONDITION_SECONDS, what=f"{kind} of {namespace}/chat with {reason}", explain=lambda: seen)
    for part in parts:
        assert part in seen["message"], seen["message"]
    ready = condition(read_pool(cluster, "chat", namespace), "Ready")
    assert ready["status"] == "False"


def test_each_obstacle_is_named_with_its_remedy(operator: Cluster, make_namespace: Callable[..., str]) -> None:
    """All at once: each waits for the same kubelets and the same operator."""
    secret, image, node, capacity, password, quota = (
        make_namespace(purpose) for purpose in ("secret", "image", "node", "capacity", "password", "quota")
    )
    endpoint = external_valkey(operator, password, "right")
    external: dict[str, Any] = {"endpoints": [endpoint], "deletionPolicy": "Retain"}
    missing = {**external, "authSecretRef": {"name": "not-there"}}
    operator.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "no-pods", "namespace": quota},
            "spec": {"hard": {"pods": "0"}},
        },
        basic_auth("wrong", password, "wrong"),
    )
    unpullable = pool_manifest("chat", image, capacity=SMALL)
    unpullable["spec"]["agent"]["image"] = "localhost/kvpool/never-built:1"
    operator.apply(
        pool_manifest("chat", secret, capacity=SMALL, valkey={"external": missing}),
        unpullable,
        pool_manifest("chat", node, capacity=SMALL, node_selector={"kvpool.io/test": "no-node"}),
        pool_manifest("chat", capacity, capacity="1Ti"),
        pool_manifest(
            "chat", password, capacity=SMALL, valkey={"external": {**external, "authSecretRef": {"name": "wrong"}}}
        ),
        pool_manifest("chat", quota, capacity=SMALL),
    )
    expect(operator, node, "AgentsAvailable", "NoNodeMatches", "nodeSelector")
    expect(operator, capacity, "AgentsAvailable", "CapacityExceedsNode", "capacityPerNode")
    expect(operator, secret, "AgentsAvailable", "SecretMissing", "not-there")
    expect(operator, image, "AgentsAvailable", "ImagePullFailed", "localhost/kvpool/never-built:1")
    expect(operator, quota, "AgentsAvailable", "QuotaExceeded", "no-pods")
    expect(operator, password, "ValkeyAvailable", "ValkeyPasswordWrong", "spec.valkey.external.authSecretRef")

    operator.kubectl("delete", "resourcequota", "no-pods", f"--namespace={quota}")
    operator.apply(basic_auth("not-there", secret, "right"))
    operator.apply(basic_auth("wrong", password, "right"))
    for namespace in (quota, secret, password):
        wait_pool_ready(operator, "chat", namespace, seconds=REMEDIED_SECONDS)
