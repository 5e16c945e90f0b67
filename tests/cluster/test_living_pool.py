"""A pool's fields changed while it lives take effect; drift is put back; what is not ours is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.external_valkey import NAME as EXTERNAL
from tests.cluster.external_valkey import basic_auth, count, external_valkey, fill
from tests.cluster.installation import SYSTEM, condition, ensure_namespace, pool_manifest, read_pool, wait_pool_ready
from tests.cluster.owned import essence, owned
from tests.cluster.pool_fleet import Admin, admin_token, is_pod_ready
from tests.cluster.stub_engine import stub_files, stub_pod
from tests.cluster.waiting import wait_for
from tests.harness.pod_transport import PodTransport

NAMESPACE = "test-living"
GUESTS = "test-living-guests"
EFFECT_SECONDS = 120.0
HOSTNAME = "kubernetes.io/hostname"
FIRST_NODE = "FIRST_NODE"
"""Stands for its name."""
TAINT = "kvpool.io/test-living"
MANAGED = {"managed": {"shards": 1, "memoryPerShard": "128Mi"}}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Living:
    """The pool `chat` as it is seen from outside."""

    cluster: Cluster
    client: PodTransport

    def get(self, kind: str, name: str) -> Any:
        return self.cluster.get(kind, name, f"--namespace={NAMESPACE}")

    def pool(self) -> Any:
        return read_pool(self.cluster, "chat", NAMESPACE)

    def patch(self, spec: dict[str, Any]) -> None:
        text = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "kvpool", "chat", f"--namespace={NAMESPACE}", "--type=merge", f"--patch={text}")

    def pods(self, component: str) -> list[Any]:
        selector = f"--selector=kvpool.io/pool=chat,app.kubernetes.io/component={component}"
        return list(self.cluster.get("pods", f"--namespace={NAMESPACE}", selector)["items"])

    def agents_have(self, check: Callable[[Any], bool]) -> bool:
        """Whether every agent's pod is as wanted, and Ready."""
        found = self.pods("agent")
        return bool(found) and all(is_pod_ready(pod) and check(pod["spec"]) for pod in found)

    def agents_are_on(self, *nodes: str) -> bool:
        """Whether there are agents on these nodes and on no others."""
        found = self.pods("agent")
        return sorted(pod["spec"]["nodeName"] for pod in found) == sorted(nodes) and all(map(is_pod_ready, found))

    def agent_stats(self) -> list[Any]:
        """What each agent says of itself."""
        admin = Admin(self.client, admin_token(self.cluster, "chat", NAMESPACE))
        return [admin.get(pod["status"]["podIP"], "/v1/stats") for pod in self.pods("agent")]

    def lets_in(self, namespace: str) -> bool:
        """Whether an engine's pod there would be given the cache; the API server asks the webhook, and makes no pod."""
        pod = stub_pod(self.cluster, "guest", namespace, annotations={"kvpool.io/pool": f"{NAMESPACE}/chat"})
        out = self.cluster.kubectl("create", "--dry-run=server", "--output=json", "--filename=-", stdin=json.dumps(pod))
        annotations = json.loads(out)["metadata"]["annotations"]
        reason = annotations.get("kvpool.io/skip-reason", "")
        assert not reason or "NamespaceNotAllowed" in reason, reason
        return "kvpool.io/injected" in annotations

    def answers(self, url: str) -> bool:
        """Whether a router is there."""
        return self.client.request("GET", f"{url}/v1/models", seconds=5.0).status == 200

    def url(self) -> str:
        return str(self.pool()["status"]["routing"]["url"])

    def engines_without_agent(self) -> int:
        return int(self.pool()["status"]["agents"]["enginesWithoutAgent"])

    def shards(self) -> Any:
        return self.pool()["status"]["valkey"]


@pytest.fixture(scope="module")
def living(operator: Cluster, client: PodTransport) -> Iterator[Living]:
    """A Ready pool with a managed Valkey, and an engine of it on the last node."""
    for name in (NAMESPACE, GUESTS):
        operator.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=90s")
        ensure_namespace(operator, name)
    operator.apply(pool_manifest("chat", NAMESPACE, capacity="64Mi", valkey=MANAGED))
    wait_pool_ready(operator, "chat", NAMESPACE)
    engine = stub_pod(operator, "engine", NAMESPACE, takes_connectors=True, node=operator.nodes[-1])
    operator.apply(stub_files(NAMESPACE, "0.31.0"), engine)
    operator.kubectl("wait", "pod/engine", f"--namespace={NAMESPACE}", "--for=condition=Ready", "--timeout=60s")
    yield Living(operator, client)
    operator.kubectl("delete", "namespace", NAMESPACE, GUESTS, "--wait=false")


def is_so(living: Living, has_effect: Callable[[Living], bool]) -> bool:
    """A field that is not there yet has had no effect yet."""
    try:
        return has_effect(living)
    except LookupError:
        return False


def node_port(living: Living) -> str:
    """The router's Service by a node's own address."""
    port = living.get("service", "chat-router")["spec"]["ports"][0]["nodePort"]
    node = living.cluster.get("node", living.cluster.nodes[0])
    address = next(one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP")
    return f"http://{address}:{port}"


def test_every_pod_but_one_init_container_is_confined(living: Living) -> None:
    pods = [pod for part in ("agent", "router", "valkey") for pod in living.pods(part)]
    pods += living.cluster.get("pods", f"--namespace={SYSTEM}")["items"]
    found = {
        (pod["metadata"]["name"], container["name"]): {**pod["spec"]["securityContext"], **container["securityContext"]}
        for pod in pods
        for container in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"])
    }
    assert {name for _, name in found} == {"socket-folder", "holder", "agent", "router", "valkey", "operator"}
    for (_, name), context in found.items():
        is_owner = name == "socket-folder"
        assert context["runAsNonRoot"] is not is_owner
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"], **({"add": ["CHOWN"]} if is_owner else {})}


@pytest.mark.local
def test_another_agent_image_reaches_the_nodes_one_after_the_other(living: Living) -> None:
    cluster = living.cluster
    image = cluster.make_variant("kvpool", "living")
    living.patch({"agent": {"image": image}})
    wait_for(
        lambda: len(living.pods("agent")) == 2 and living.agents_have(lambda spec: _images(spec) == {image}),
        seconds=EFFECT_SECONDS,
        what=f"agents of {image}",
    )
    first, second = sorted(living.pods("agent"), key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    ready = next(one for one in first["status"]["conditions"] if one["type"] == "Ready")
    assert ready["lastTransitionTime"] <= second["metadata"]["creationTimestamp"]
    wait_pool_ready(cluster, "chat", NAMESPACE)
    assert living.pool()["status"]["agents"]["image"] == image


def _images(spec: Any) -> set[str]:
    return {each["image"] for each in (*spec["initContainers"], *spec["containers"])}


def _cpu(spec: Any) -> tuple[str, str]:
    resources = spec["containers"][0]["resources"]
    return resources["requests"]["cpu"], resources["limits"]["cpu"]


NOT_ON_FIRST_NODE = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": HOSTNAME, "operator": "NotIn", "values": [FIRST_NODE]}]}
            ]
        }
    }
}
AGENT_FIELDS = {
    "agent": {
        "priorityClassName": "system-node-critical",
        "imagePullSecrets": [{"name": "pull"}],
        "imagePullPolicy": "Never",
        "resources": {"requests": {"cpu": "33m"}, "limits": {"cpu": "2"}},
    },
    "ram": {"capacityPerNode": "96Mi"},
}
"""Together: each alone would replace the agents once more."""
GUESTS_ONLY = {"from": "Selector", "selector": {"matchLabels": {"kubernetes.io/metadata.name": GUESTS}}}


@pytest.mark.parametrize(
    ("spec", "has_effect"),
    [
        ({"allowedNamespaces": {"from": "All"}}, lambda c: c.lets_in(GUESTS) and c.lets_in(NAMESPACE)),
        ({"allowedNamespaces": GUESTS_ONLY}, lambda c: c.lets_in(GUESTS) and not c.lets_in(NAMESPACE)),
        ({"allowedNamespaces": {"from": "Same", "selector": None}}, lambda c: c.lets_in(NAMESPACE) and not c.lets_in(GUESTS)),
        (
            {"agent": {"nodeSelector": {HOSTNAME: FIRST_NODE}}},
            lambda c: c.agents_are_on(c.cluster.nodes[0]) and c.engines_without_agent() == 1,
        ),
        (
            {"agent": {"affinity": NOT_ON_FIRST_NODE, "nodeSelector": {HOSTNAME: None, "kubernetes.io/os": "linux"}}},
            lambda c: c.agents_are_on(*c.cluster.nodes[1:]) and c.engines_without_agent() == 0,
        ),
        pytest.param(
            AGENT_FIELDS,
            lambda c: c.agents_have(lambda spec: spec["priority"] == 2_000_001_000),
            id="agent.priorityClassName",
        ),
        pytest.param(
            AGENT_FIELDS,
            lambda c: c.agents_have(lambda spec: spec["imagePullSecrets"] == [{"name": "pull"}]),
            id="agent.imagePullSecrets",
        ),
        pytest.param(
            AGENT_FIELDS,
            lambda c: c.agents_have(lambda spec: {each["imagePullPolicy"] for each in spec["containers"]} == {"Never"}),
            id="agent.imagePullPolicy",
        ),
        pytest.param(
            AGENT_FIELDS, lambda c: c.agents_have(lambda spec: _cpu(spec) == ("33m", "2")), id="agent.resources"
        ),
        pytest.param(
            AGENT_FIELDS,
            lambda c: [each["arena"]["capacity_bytes"] for each in c.agent_stats() if each["ready"]] == [96 * MIB],
            id="ram.capacityPerNode",
        ),
        ({"routing": {"replicas": 1}}, lambda c: len(c.pods("router")) == 1 and c.answers(c.url())),
        ({"routing": {"service": {"port": 81}}}, lambda c: c.url().endswith(":81") and c.answers(c.url())),
        (
            {"routing": {"service": {"annotations": {"example.com/a": "b"}}}},
            lambda c: c.get("service", "chat-router")["metadata"]["annotations"]["example.com/a"] == "b",
        ),
        ({"routing": {"service": {"type": "NodePort"}}}, lambda c: c.answers(node_port(c))),
        (
            {"routing": {"mode": "Disabled"}},
            lambda c: not c.pods("router") and "routing" not in c.pool()["status"],
        ),
        ({"routing": {"mode": "Proxy"}}, lambda c: c.answers(c.url())),
        (
            {"valkey": {"managed": {"memoryPerShard": "160Mi"}}},
            lambda c: [p["spec"]["containers"][0]["resources"]["limits"]["memory"] for p in c.pods("valkey")] == [str(160 * MIB)],
        ),
        ({"valkey": {"managed": {"shards": 3}}}, lambda c: c.shards() == {"shards": 3, "ready": 3, "slotsCovered": 16384}),
        (
            {"valkey": {"managed": {"shards": 2}}},
            lambda c: len(c.pods("valkey")) == 2 and c.shards() == {"shards": 2, "ready": 2, "slotsCovered": 16384},
        ),
        ({"valkey": None}, lambda c: not c.pods("valkey") and all(each["valkey"] is None for each in c.agent_stats())),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_changed_field_takes_effect(
    living: Living, spec: dict[str, Any], has_effect: Callable[[Living], bool]
) -> None:
    living.patch(json.loads(json.dumps(spec).replace(FIRST_NODE, living.cluster.nodes[0])))
    wait_for(lambda: is_so(living, has_effect), seconds=EFFECT_SECONDS, what=f"{spec} took effect")
    wait_pool_ready(living.cluster, "chat", NAMESPACE)


def test_tolerations_let_agents_onto_a_tainted_node(living: Living) -> None:
    cluster, node = living.cluster, living.pods("agent")[0]["spec"]["nodeName"]
    toleration = {"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}
    uids = {pod["metadata"]["uid"] for pod in living.pods("agent")}
    cluster.kubectl("taint", "node", node, f"{TAINT}=:NoSchedule")
    try:
        living.patch({"agent": {"tolerations": [toleration]}})

        def is_replaced() -> bool:
            new = {pod["metadata"]["uid"] for pod in living.pods("agent")}
            return not new & uids and living.agents_are_on(node)

        wait_for(is_replaced, seconds=EFFECT_SECONDS, what="a new agent on the tainted node")
    finally:
        cluster.kubectl("taint", "node", node, f"{TAINT}-")


def test_fields_of_an_external_valkey_take_effect(operator: Cluster, make_namespace: Callable[..., str]) -> None:
    """A second server, which only the second Secret's password opens, takes the first one's place."""
    namespace, elsewhere = make_namespace("external"), make_namespace("external-second")
    first, second = external_valkey(operator, namespace, "one"), external_valkey(operator, elsewhere, "two")
    operator.apply(basic_auth("second", namespace, "two"))
    external: dict[str, Any] = {"endpoints": [first], "authSecretRef": {"name": EXTERNAL}, "keyPrefix": "mine:"}
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi", valkey={"external": external}))
    wait_pool_ready(operator, "chat", namespace)
    assert read_pool(operator, "chat", namespace)["metadata"]["finalizers"]

    external |= {"endpoints": [second], "authSecretRef": {"name": "second"}, "deletionPolicy": "Retain"}
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi", valkey={"external": external}))

    def has_effect() -> bool:
        pool = read_pool(operator, "chat", namespace)
        is_rolled_out = condition(pool, "RolloutComplete").get("status") == "True"
        is_connected = condition(pool, "ValkeyAvailable").get("reason") == "Connected"
        return is_rolled_out and is_connected and not pool["metadata"].get("finalizers")

    wait_for(has_effect, seconds=EFFECT_SECONDS, what="endpoints, Secret and deletion policy took effect")
    wait_pool_ready(operator, "chat", namespace)
    fill(operator, elsewhere, "two", "mine:", 10)
    fill(operator, elsewhere, "two", f"kvpool:{namespace}/chat:", 10)
    operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", "--timeout=60s")
    assert count(operator, elsewhere, "two", "mine:") == 10, "Retain keeps our keys"

    external["deletionPolicy"] = "Purge"
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi", valkey={"external": external}))
    wait_pool_ready(operator, "chat", namespace)
    operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", "--timeout=60s")
    assert count(operator, elsewhere, "two", "mine:") == 0
    assert count(operator, elsewhere, "two", f"kvpool:{namespace}/chat:") == 10, (
        "the prefix that is given is the only one"
    )


def test_hand_edits_of_owned_objects_are_put_back(living: Living) -> None:
    cluster = living.cluster
    before = essence(owned(cluster, "chat", NAMESPACE))
    for kind, name, change in (
        ("daemonset", "chat-agent", {"spec": {"template": {"spec": {"priorityClassName": "system-cluster-critical"}}}}),
        ("deployment", "chat-router", {"spec": {"replicas": 3, "paused": True}}),
        ("configmap", "chat-agent", {"data": {"agent.yaml": "garbage"}}),
        ("service", "chat-router", {"spec": {"selector": {"app": "somebody-else"}}}),
        ("secret", "chat-token", {"stringData": {"token": "known-to-all"}}),
        ("poddisruptionbudget", "chat-router", {"spec": {"maxUnavailable": None, "minAvailable": 2}}),
        ("rolebinding", "chat-router", {"subjects": []}),
    ):
        text = json.dumps(change)
        cluster.kubectl("patch", kind, name, f"--namespace={NAMESPACE}", "--type=merge", f"--patch={text}")
    cluster.kubectl("delete", "serviceaccount", "chat-router", f"--namespace={NAMESPACE}")
    cluster.kubectl("delete", "clusterrolebinding", f"kvpool:{NAMESPACE}:chat:agent")
    wait_for(
        lambda: essence(owned(cluster, "chat", NAMESPACE)) == before,
        seconds=EFFECT_SECONDS,
        what="owned objects as before",
        explain=lambda: set(essence(owned(cluster, "chat", NAMESPACE)).items()) ^ set(before.items()),
    )
    wait_pool_ready(cluster, "chat", NAMESPACE)


FOREIGN: tuple[Any, ...] = (
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "chat-agent"}, "data": {"theirs": "yes"}},
    {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-token"}, "stringData": {"theirs": "yes"}},
    {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat-router"}, "spec": {"ports": [{"port": 1}]}},
    {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "chat-agent", "labels": {"theirs": "yes"}}},
)


def test_objects_of_the_same_names_that_are_not_ours_are_never_touched(
    operator: Cluster, make_namespace: Callable[..., str]
) -> None:
    namespace = make_namespace("foreign")
    operator.apply(*({**each, "metadata": {**each["metadata"], "namespace": namespace}} for each in FOREIGN))

    def versions() -> list[str]:
        found = [operator.get(f["kind"], f["metadata"]["name"], f"--namespace={namespace}") for f in FOREIGN]
        return [f"{each['metadata']['uid']} {each['metadata']['resourceVersion']}" for each in found]

    before = versions()
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi"))

    def is_named() -> bool:
        found = condition(read_pool(operator, "chat", namespace), "Ready")
        return found.get("reason") == "NameConflict" and "chat-" in found["message"]

    wait_for(is_named, seconds=60, what="NameConflict")
    operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", "--timeout=60s")
    assert versions() == before
