"""A pool that goes takes everything of its own along and nothing else; uninstalling never leaves anything hanging."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.cluster.asking import asking
from tests.cluster.cluster import Cluster
from tests.cluster.external_valkey import NAME, count, external_valkey, fill
from tests.cluster.installation import (
    RELEASE,
    SYSTEM,
    helm_install,
    pool_manifest,
    read_pool,
    wait_pool_ready,
)
from tests.cluster.owned import owned, traces
from tests.cluster.stub_engine import PORT, stub_files, stub_pod
from tests.cluster.waiting import wait_for
from tests.harness.pod_transport import PodTransport

OURS = 100_000
FOREIGN = 1_000
DELETE_SECONDS = 60.0
PASSWORD = "purge-me"
KINDS = {
    "ConfigMap",
    "ClusterRoleBinding",
    "DaemonSet",
    "Deployment",
    "PodDisruptionBudget",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
}


def own_service(namespace: str) -> dict[str, Any]:
    """Of the engine, as its team made it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "engine", "namespace": namespace},
        "spec": {"selector": {"app": "engine"}, "ports": [{"port": 80, "targetPort": PORT}]},
    }


def test_deletion_purges_our_keys_and_objects_and_the_pool_can_come_back(
    operator: Cluster, client: PodTransport, make_namespace: Callable[..., str]
) -> None:
    namespace, guests = make_namespace("delete"), make_namespace("delete-guests", team="guests")
    endpoint = external_valkey(operator, namespace, PASSWORD)
    pool = pool_manifest(
        "chat",
        namespace,
        capacity="64Mi",
        valkey={"external": {"endpoints": [endpoint], "authSecretRef": {"name": NAME}}},
        allowedNamespaces={"from": "Selector", "selector": {"matchLabels": {"team": "guests"}}},
    )
    operator.apply(pool)
    wait_pool_ready(operator, "chat", namespace)
    engine = stub_pod(
        operator, "engine", guests, takes_connectors=True, annotations={"kvpool.io/pool": f"{namespace}/chat"}
    )
    operator.apply(stub_files(guests, "0.31.0"), own_service(guests), engine)
    operator.kubectl("wait", "pod/engine", f"--namespace={guests}", "--for=condition=Ready", "--timeout=60s")
    prefix, foreign = f"kvpool:{namespace}/chat:", "kvpool:other/chat:"
    fill(operator, namespace, PASSWORD, prefix, OURS)
    fill(operator, namespace, PASSWORD, foreign, FOREIGN)
    uid = read_pool(operator, "chat", namespace)["metadata"]["uid"]
    before = owned(operator, "chat", namespace)
    assert {key.partition("/")[0] for key in before} == KINDS
    assert set(before) <= set(traces(operator, uid))

    def ask_engine() -> bool:
        reply = client.request("GET", f"http://engine.{guests}.svc/v1/models", seconds=30.0)
        assert reply.status == 200, reply
        return True

    wait_for(ask_engine, seconds=30, what="the engine answers on its own Service")
    with asking(ask_engine) as asked:
        started = time.monotonic()
        operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", f"--timeout={DELETE_SECONDS:g}s")
        operator.apply(pool)  # at once: nothing of the old one may be taken for the new one's
        assert count(operator, namespace, PASSWORD, prefix) == 0
        wait_for(
            lambda: not traces(operator, uid),
            seconds=DELETE_SECONDS - (time.monotonic() - started),
            what="nothing of the former pool is left",
            explain=lambda: traces(operator, uid),
        )
        assert count(operator, namespace, PASSWORD, foreign) == FOREIGN
        events = operator.get("events", f"--namespace={namespace}")["items"]
        assert any(e["reason"] == "KeysPurged" and e["involvedObject"]["uid"] == uid for e in events)
        wait_pool_ready(operator, "chat", namespace)
    assert asked.answered
    assert asked.problems == []

    operator.kubectl("delete", "pod", NAME, f"--namespace={namespace}", "--wait=true")  # Valkey is gone, too
    uid = read_pool(operator, "chat", namespace)["metadata"]["uid"]
    operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", "--timeout=90s")
    wait_for(lambda: not traces(operator, uid), seconds=60, what="every owned object is gone")


def test_uninstalling_with_pools_standing_leaves_nothing_hanging(
    operator: Cluster, make_namespace: Callable[..., str]
) -> None:
    namespace = make_namespace("uninstall")
    external = {"endpoints": ["valkey.nowhere.example:6379"]}
    managed = {"shards": 1, "memoryPerShard": "128Mi"}
    operator.apply(
        pool_manifest("purging", namespace, capacity="64Mi", valkey={"external": external}),
        pool_manifest("managing", namespace, capacity="64Mi", valkey={"managed": managed}),
    )
    for name in ("purging", "managing"):
        wait_for(lambda name=name: owned(operator, name, namespace), seconds=30, what="the pool's objects")  # type: ignore[misc]
    wait_for(
        lambda: read_pool(operator, "purging", namespace)["metadata"].get("finalizers"), seconds=30, what="a finalizer"
    )
    operator.helm("uninstall", RELEASE, f"--namespace={SYSTEM}", "--wait", "--timeout=90s")
    try:
        selector = f"--selector=app.kubernetes.io/instance={RELEASE},app.kubernetes.io/managed-by=Helm"
        left = operator.get("clusterroles,clusterrolebindings,mutatingwebhookconfigurations", selector)["items"]
        assert [each["metadata"]["name"] for each in left] == []
        operator.kubectl("delete", "namespace", namespace, "--timeout=90s")
        operator.kubectl("delete", "namespace", SYSTEM, "--timeout=90s")
    finally:
        helm_install(operator)
