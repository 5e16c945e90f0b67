"""A pool's fields changed while it lives take effect; drift is put back; what is not ours is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.external_valkey import NAME as EXTERNAL
from tests.cluster.external_valkey import basic_auth, external_valkey
from tests.cluster.installation import condition, ensure_namespace, pool_manifest, read_pool, wait_pool_ready
from tests.cluster.owned import essence, owned
from tests.cluster.pool_fleet import is_pod_ready
from tests.cluster.waiting import wait_for

NAMESPACE = "test-living"
EFFECT_SECONDS = 120.0
MANAGED = {"managed": {"shards": 1, "memoryPerShard": "128Mi"}}


@pytest.fixture(scope="module")
def pool(operator: Cluster) -> Iterator[Cluster]:
    """A Ready pool `chat` with a managed Valkey, and `other` with an external one that is not reached by anybody else."""
    operator.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s")
    ensure_namespace(operator, NAMESPACE)
    operator.apply(pool_manifest("chat", NAMESPACE, capacity="64Mi", valkey=MANAGED))
    wait_pool_ready(operator, "chat", NAMESPACE)
    yield operator
    operator.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def patch(cluster: Cluster, spec: dict[str, Any], name: str = "chat") -> None:
    cluster.kubectl(
        "patch", "kvpool", name, f"--namespace={NAMESPACE}", "--type=merge", f"--patch={json.dumps({'spec': spec})}"
    )


def get(cluster: Cluster, kind: str, name: str) -> Any:
    return cluster.get(kind, name, f"--namespace={NAMESPACE}")


def pods(cluster: Cluster, component: str) -> list[Any]:
    selector = f"--selector=kvpool.io/pool=chat,app.kubernetes.io/component={component}"
    return list(cluster.get("pods", f"--namespace={NAMESPACE}", selector)["items"])


def agent_template(cluster: Cluster) -> Any:
    return get(cluster, "daemonset", "chat-agent")["spec"]["template"]["spec"]


def agent_container(cluster: Cluster) -> Any:
    return agent_template(cluster)["containers"][0]


def agent_yaml(cluster: Cluster) -> str:
    return str(get(cluster, "configmap", "chat-agent")["data"]["agent.yaml"])


def agents_have(cluster: Cluster, check: Callable[[Any], bool]) -> bool:
    """Whether every agent's pod, not only the template, is as wanted and Ready."""
    found = pods(cluster, "agent")
    return bool(found) and all(is_pod_ready(pod) and check(pod["spec"]) for pod in found)


def is_so(cluster: Cluster, has_effect: Callable[[Cluster], bool]) -> bool:
    """A field that is not there yet has had no effect yet."""
    try:
        return has_effect(cluster)
    except LookupError:
        return False


TOLERATION = {"key": "test", "operator": "Exists", "effect": "NoSchedule"}
AFFINITY = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]}}
        ]
    }
}


@pytest.mark.parametrize(
    ("spec", "has_effect"),
    [
        (  # first: the other fields of the agents then have one to replace
            {"agent": {"nodeSelector": {"kubernetes.io/hostname": "node-a"}}},
            lambda c: [pod["spec"]["nodeName"] for pod in pods(c, "agent")] == ["node-a"],
        ),
        (
            {"agent": {"tolerations": [TOLERATION]}},
            lambda c: agents_have(c, lambda spec: TOLERATION in spec["tolerations"]),
        ),
        ({"agent": {"affinity": AFFINITY}}, lambda c: "preferred" in json.dumps(agent_template(c)["affinity"])),
        (
            {"agent": {"priorityClassName": "system-node-critical"}},
            lambda c: agent_template(c)["priorityClassName"] == "system-node-critical",
        ),
        (
            {"agent": {"imagePullSecrets": [{"name": "pull"}]}},
            lambda c: agents_have(c, lambda spec: {"name": "pull"} in spec["imagePullSecrets"]),
        ),
        ({"agent": {"imagePullPolicy": "Never"}}, lambda c: agent_container(c)["imagePullPolicy"] == "Never"),
        (
            {"agent": {"resources": {"requests": {"cpu": "33m"}}}},
            lambda c: agents_have(c, lambda spec: spec["containers"][0]["resources"]["requests"]["cpu"] == "33m"),
        ),
        ({"ram": {"capacityPerNode": "96Mi"}}, lambda c: "96Mi" in agent_yaml(c)),
        (
            {"allowedNamespaces": {"from": "All"}},
            lambda c: get(c, "configmap", "chat-namespaces")["data"]["allowed"].strip() == "*",
        ),
        (
            {"allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}}},
            lambda c: get(c, "configmap", "chat-namespaces")["data"]["allowed"].split() == [NAMESPACE],
        ),
        ({"routing": {"replicas": 1}}, lambda c: len(pods(c, "router")) == 1),
        (
            {"routing": {"service": {"port": 81}}},
            lambda c: (
                get(c, "service", "chat-router")["spec"]["ports"][0]["port"] == 81
                and read_pool(c, "chat", NAMESPACE)["status"]["routing"]["url"].endswith(":81")
            ),
        ),
        (
            {"routing": {"service": {"annotations": {"example.com/a": "b"}}}},
            lambda c: get(c, "service", "chat-router")["metadata"]["annotations"]["example.com/a"] == "b",
        ),
        (
            {"routing": {"service": {"type": "NodePort"}}},
            lambda c: get(c, "service", "chat-router")["spec"]["type"] == "NodePort",
        ),
        ({"routing": {"mode": "Disabled"}}, lambda c: not pods(c, "router")),
        ({"routing": {"mode": "Proxy"}}, lambda c: len(pods(c, "router")) == 1),
        (
            {"valkey": {"managed": {"memoryPerShard": "160Mi"}}},
            lambda c: [p["spec"]["containers"][0]["resources"]["limits"]["memory"] for p in pods(c, "valkey")] == [str(160 << 20)],
        ),
        (
            {"valkey": {"managed": {"shards": 3}}},
            lambda c: read_pool(c, "chat", NAMESPACE)["status"]["valkey"] == {"shards": 3, "ready": 3, "slotsCovered": 16384},
        ),
        (
            {"valkey": {"managed": {"shards": 2}}},
            lambda c: read_pool(c, "chat", NAMESPACE)["status"]["valkey"] == {"shards": 2, "ready": 2, "slotsCovered": 16384},
        ),
        ({"valkey": None}, lambda c: not pods(c, "valkey") and "valkey" not in agent_yaml(c)),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_changed_field_takes_effect(
    pool: Cluster, spec: dict[str, Any], has_effect: Callable[[Cluster], bool]
) -> None:
    patch(pool, spec)
    wait_for(lambda: is_so(pool, has_effect), seconds=EFFECT_SECONDS, what=f"{spec} took effect")
    wait_pool_ready(pool, "chat", NAMESPACE)


def test_fields_of_an_external_valkey_take_effect(operator: Cluster, make_namespace: Callable[..., str]) -> None:
    namespace = make_namespace("external")
    endpoint = external_valkey(operator, namespace, "first")
    operator.apply(basic_auth("second", namespace, "first"))
    external: dict[str, Any] = {"endpoints": [endpoint], "authSecretRef": {"name": EXTERNAL}, "keyPrefix": "mine:"}
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi", valkey={"external": external}))
    wait_pool_ready(operator, "chat", namespace)
    assert read_pool(operator, "chat", namespace)["metadata"]["finalizers"]

    external |= {"endpoints": [endpoint.replace(".svc", ".svc.cluster.local")], "authSecretRef": {"name": "second"}}
    external["deletionPolicy"] = "Retain"
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi", valkey={"external": external}))

    def has_effect() -> bool:
        config = operator.get("configmap", "chat-agent", f"--namespace={namespace}")["data"]["agent.yaml"]
        volumes = json.dumps(
            operator.get("pods", f"--namespace={namespace}", "--selector=app.kubernetes.io/component=agent")
        )
        finalizers = read_pool(operator, "chat", namespace)["metadata"].get("finalizers", [])
        return "svc.cluster.local" in config and '"second"' in volumes and not finalizers

    wait_for(has_effect, seconds=EFFECT_SECONDS, what="endpoints, secret and deletion policy took effect")
    wait_pool_ready(operator, "chat", namespace)


def test_hand_edits_of_owned_objects_are_put_back(pool: Cluster) -> None:
    before = essence(owned(pool, "chat", NAMESPACE))
    for kind, name, change in (
        ("daemonset", "chat-agent", {"spec": {"template": {"spec": {"priorityClassName": "system-cluster-critical"}}}}),
        ("deployment", "chat-router", {"spec": {"replicas": 3}}),
        ("configmap", "chat-agent", {"data": {"agent.yaml": "garbage"}}),
        ("service", "chat-router", {"spec": {"selector": {"app": "somebody-else"}}}),
    ):
        text = json.dumps(change)
        pool.kubectl("patch", kind, name, f"--namespace={NAMESPACE}", "--type=merge", f"--patch={text}")
    pool.kubectl("delete", "serviceaccount", "chat-router", f"--namespace={NAMESPACE}")
    wait_for(
        lambda: essence(owned(pool, "chat", NAMESPACE)) == before,
        seconds=EFFECT_SECONDS,
        what="owned objects as before",
        explain=lambda: set(essence(owned(pool, "chat", NAMESPACE)).items()) ^ set(before.items()),
    )
    wait_pool_ready(pool, "chat", NAMESPACE)


def test_an_object_of_the_same_name_that_is_not_ours_is_never_touched(
    operator: Cluster, make_namespace: Callable[..., str]
) -> None:
    namespace = make_namespace("foreign")
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "chat-agent", "namespace": namespace},
        "data": {"theirs": "yes"},
    }
    operator.apply(foreign)
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi"))

    def is_named() -> bool:
        found = condition(read_pool(operator, "chat", namespace), "Ready")
        return found.get("reason") == "NameConflict" and "chat-agent" in found["message"]

    wait_for(is_named, seconds=60, what="NameConflict")
    operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", "--timeout=60s")
    assert operator.get("configmap", "chat-agent", f"--namespace={namespace}")["data"] == {"theirs": "yes"}
