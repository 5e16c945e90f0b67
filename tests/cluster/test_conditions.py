"""What a pool cannot have is named in its conditions, with the remedy, and the remedy cures it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.external_valkey import basic_auth, external_valkey
from tests.cluster.installation import condition, pool_manifest, read_pool, wait_pool_ready
from tests.cluster.waiting import wait_for
from tests.cluster.workloads import Manifest

CONDITION_SECONDS = 90.0
REMEDIED_SECONDS = 180.0
"""A kubelet tries a volume whose Secret was missing again after up to two minutes."""
SMALL = "64Mi"
NEVER_BUILT = "localhost/kvpool/never-built:1"
NODE_LABEL = "kvpool.io/test-conditions"


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


def change(cluster: Cluster, namespace: str, spec: dict[str, Any]) -> None:
    """Merge something into the pool's spec."""
    text = json.dumps({"spec": spec})
    cluster.kubectl("patch", "kvpool", "chat", f"--namespace={namespace}", "--type=merge", f"--patch={text}")


def test_each_obstacle_is_named_with_its_remedy_which_cures_it(
    operator: Cluster, make_namespace: Callable[..., str]
) -> None:
    """All at once: each waits for the same kubelets and the same operator."""
    secret, image, node, capacity, password, quota = (
        make_namespace(purpose) for purpose in ("secret", "image", "node", "capacity", "password", "quota")
    )
    endpoint = external_valkey(operator, password, "right")
    external: dict[str, Any] = {"endpoints": [endpoint], "deletionPolicy": "Retain"}

    def pool(namespace: str, *, capacity: str = SMALL, auth: str = "", **more: Any) -> Manifest:
        if auth:
            more["valkey"] = {"external": {**external, "authSecretRef": {"name": auth}}}
        return pool_manifest("chat", namespace, capacity=capacity, routing={"mode": "Disabled"}, **more)

    operator.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "no-pods", "namespace": quota},
            "spec": {"hard": {"pods": "0"}},
        },
        basic_auth("wrong", password, "wrong"),
    )
    unpullable = pool(image)
    unpullable["spec"]["agent"]["image"] = NEVER_BUILT
    operator.apply(
        pool(secret, auth="not-there"),
        unpullable,
        pool(node, node_selector={NODE_LABEL: "yes"}),
        pool(capacity, capacity="1Ti"),
        pool(password, auth="wrong"),
        pool(quota),
    )
    expect(operator, node, "AgentsAvailable", "NoNodeMatches", f"kubectl label node NAME {NODE_LABEL}=yes")
    expect(operator, capacity, "AgentsAvailable", "CapacityExceedsNode", "capacityPerNode", "lower the capacity")
    expect(operator, secret, "AgentsAvailable", "SecretMissing", f"Secret not-there: create it in namespace {secret}")
    expect(operator, image, "AgentsAvailable", "ImagePullFailed", f"image {NEVER_BUILT}", "correct its name")
    expect(operator, quota, "AgentsAvailable", "QuotaExceeded", "raise the quota", "no-pods")
    wrong = "correct keys username and password of spec.valkey.external.authSecretRef's Secret"
    expect(operator, password, "ValkeyAvailable", "ValkeyPasswordWrong", wrong)

    operator.kubectl("label", "node", operator.nodes[0], f"{NODE_LABEL}=yes")
    try:
        change(operator, capacity, {"ram": {"capacityPerNode": SMALL}})
        operator.apply(basic_auth("not-there", secret, "right"))
        change(operator, image, {"agent": {"image": None}})
        operator.kubectl("delete", "resourcequota", "no-pods", f"--namespace={quota}")
        operator.apply(basic_auth("wrong", password, "right"))
        for namespace in (node, capacity, secret, image, quota, password):
            wait_pool_ready(operator, "chat", namespace, seconds=REMEDIED_SECONDS)
    finally:
        operator.kubectl("label", "node", operator.nodes[0], f"{NODE_LABEL}-")
