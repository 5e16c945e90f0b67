"""What an injected pod asks for: its init container, its class of service, and memory for page tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.webhook import contract
from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.engine_memory import memory_bytes
from kvpool_operator.webhook.views import NamespaceFacts, NodeView, Taint
from tests.unit.webhook_pods import around, engine, engine_pod, injected, pool_with


def init_container(pod: Manifest) -> Manifest:
    """The injected one."""
    container: Manifest = pod["spec"]["initContainers"][-1]
    assert container["name"] == contract.INIT_CONTAINER
    return container


def test_the_init_container_is_restricted() -> None:
    container = init_container(injected(engine_pod()))
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(
    ("of_pod", "of_container", "expected"),
    [
        ({}, {}, 65532),
        ({"runAsUser": 1000}, {}, 1000),
        ({"runAsUser": 1000}, {"runAsUser": 7}, 7),
        ({"runAsUser": 0}, {}, 65532),
    ],
)
def test_the_init_container_runs_as_the_engines_user_but_never_as_root(
    of_pod: Manifest, of_container: Manifest, expected: int
) -> None:
    pod = engine_pod(securityContext=of_container)
    pod["spec"]["securityContext"] = of_pod
    assert init_container(injected(pod))["securityContext"]["runAsUser"] == expected


@pytest.mark.parametrize(
    ("of_engine", "expected"),
    [
        ({}, {}),
        ({"limits": {"nvidia.com/gpu": "1"}}, {}),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": "2"}}),
        ({"limits": {"memory": "64Mi"}}, {"limits": {"memory": "64Mi"}}),
        (
            {
                "requests": {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"},
                "limits": {"memory": "10Gi", "nvidia.com/gpu": "1", "ephemeral-storage": "1Gi"},
            },
            {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "10Gi", "ephemeral-storage": "1Gi"}},
        ),
    ],
)
def test_the_init_container_asks_for_what_the_engine_asks_for(of_engine: Manifest, expected: Manifest) -> None:
    assert init_container(injected(engine_pod(resources=of_engine))).get("resources", {}) == expected


AMOUNTS = st.dictionaries(
    st.sampled_from(["cpu", "memory", "ephemeral-storage", "nvidia.com/gpu"]), st.sampled_from(["1", "2Gi", "500M"])
)
RESOURCES = st.fixed_dictionaries({}, optional={"requests": AMOUNTS, "limits": AMOUNTS})


def qos_class(pod: Manifest) -> str:
    """As k8s.io/kubernetes/pkg/apis/core/helper/qos computes it."""
    resources = [
        each.get("resources") or {} for each in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    ]
    counted = ("cpu", "memory")
    amounts = [(kind, name) for each in resources for kind, of in each.items() for name in of if name in counted]
    if not amounts:
        return "BestEffort"
    for each in resources:
        limits, requests = each.get("limits", {}), {**each.get("limits", {}), **each.get("requests", {})}
        if any(name not in limits or requests[name] != limits[name] for name in counted):
            return "Burstable"
    return "Guaranteed"


@given(of_engine=RESOURCES, of_other=RESOURCES)
def test_a_pod_keeps_its_quality_of_service(of_engine: Manifest, of_other: Manifest) -> None:
    pod = engine_pod(resources=of_engine)
    pod["spec"]["containers"].append({"name": "other", "image": "x", "resources": of_other})
    assert qos_class(injected(pod)) == qos_class(pod)


def memory_of(pod: Manifest) -> tuple[str, str]:
    """(request, limit) of the engine."""
    resources = engine(pod)["resources"]
    return resources.get("requests", {}).get("memory", ""), resources.get("limits", {}).get("memory", "")


def bounded(request: str, limit: str) -> Manifest:
    """Resources with these amounts of memory."""
    return {name: {"memory": amount} for name, amount in (("requests", request), ("limits", limit)) if amount}


@pytest.mark.parametrize(
    ("before", "arguments", "after"),
    [
        (("8Gi", "8Gi"), (), ("8320Mi", "8320Mi")),
        (("4Gi", "8Gi"), (), ("4Gi", "8320Mi")),
        (("8Gi", "8Gi"), ("-tp", "2"), ("8448Mi", "8448Mi")),
        (("8Gi", "8Gi"), ("--tensor-parallel-size=2", "--data_parallel_size", "2"), ("8704Mi", "8704Mi")),
        (("8Gi", ""), (), ("8Gi", "")),
        (("1e9", "1e9"), (), ("1134217728", "1134217728")),
        (("8G", "8G"), (), ("8134217728", "8134217728")),
        (("8192Mi", "8Gi"), (), ("8320Mi", "8320Mi")),
        (("8589934592000m", "8.0Gi"), (), ("8320Mi", "8320Mi")),
        (("1", "9E"), (), ("1", "9000000000134217728")),
        (("1", "9223372036854775807"), (), ("1", "9223372036854775807")),
        (("100m", "100m"), (), ("100m", "100m")),
    ],
)
def test_page_tables_of_the_arena_are_added_to_a_limit(
    before: tuple[str, str], arguments: tuple[str, ...], after: tuple[str, str]
) -> None:
    assert memory_of(injected(engine_pod(*arguments, resources=bounded(*before)))) == after


def test_memory_is_left_alone_where_more_may_be_refused_or_is_not_needed() -> None:
    pod = engine_pod(resources=bounded("8Gi", "8Gi"))
    quota = around(facts=NamespaceFacts("default", bounds_memory=True))
    for surroundings in (quota, pool_with(huge_pages=True)):
        assert memory_of(injected(pod, surroundings)) == ("8Gi", "8Gi")
    pod["spec"]["resources"] = {"limits": {"memory": "9Gi"}}
    assert memory_of(injected(pod)) == ("8Gi", "8Gi")
    assert "resources" not in init_container(injected(pod))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("before", "nodes", "after"),
    [
        (("4Gi", "8Gi"), (), ("4Gi", "8320Mi")),
        (("8Gi", "8Gi"), (8 * GIB,), ("8Gi", "8Gi")),
        (("", "8Gi"), (8 * GIB,), ("", "8Gi")),
        (("8Gi", "8Gi"), (8 * GIB, 9 * GIB), ("8320Mi", "8320Mi")),
        (("8Gi", "8Gi"), (8320 << 20,), ("8320Mi", "8320Mi")),
        (("8Gi", "8Gi"), (8 * GIB, 0), ("8Gi", "8Gi")),
        (("8Gi", "8Gi"), (), ("8Gi", "8Gi")),
        (("4Gi", "8Gi"), (8 * GIB,), ("4Gi", "8320Mi")),
    ],
)
def test_a_request_is_not_raised_above_what_every_node_has(
    before: tuple[str, str], nodes: tuple[int, ...], after: tuple[str, str]
) -> None:
    known = tuple(NodeView(f"node-{amount}", memory_bytes=amount) for amount in nodes)
    large = NodeView("cordoned", unschedulable=True, memory_bytes=64 * GIB)
    pod = engine_pod(resources=bounded(*before))
    assert memory_of(injected(pod, pool_with(nodes=known and (*known, large)))) == after


SICK = Taint("node.kubernetes.io/not-ready", "", "NoSchedule")


def node_of(name: str, size: int, *, is_sick: bool = False, is_cordoned: bool = False) -> NodeView:
    """A node on which the pod cannot land now when it is sick or cordoned."""
    return NodeView(name, taints=(SICK,) if is_sick else (), unschedulable=is_cordoned, memory_bytes=size)


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        ([node_of("sick", 8 * GIB, is_sick=True)], "8Gi"),
        ([node_of("cordoned", 8 * GIB, is_cordoned=True)], "8Gi"),
        ([node_of("small", 4 * GIB), node_of("sick", 8 * GIB, is_sick=True)], "8Gi"),
        ([node_of("sick", 9 * GIB, is_sick=True)], "8320Mi"),
        ([node_of("small", 4 * GIB), node_of("sick", 9 * GIB, is_sick=True)], "8320Mi"),
        ([node_of("exact", 8 * GIB), node_of("sick", 64 * GIB, is_sick=True)], "8Gi"),
        ([node_of("small", 4 * GIB)], "8Gi"),
    ],
)
def test_a_node_where_the_pod_cannot_land_now_counts_by_its_size(nodes: list[NodeView], after: str) -> None:
    """Raised above what its only node has, the pod would wait for ever, also once the node is well again."""
    pod = engine_pod(resources=bounded("8Gi", "8Gi"))
    assert memory_of(injected(pod, pool_with(nodes=tuple(nodes)))) == (after, after)


def test_what_else_the_pod_reserves_counts_beside_its_engine() -> None:
    pool = pool_with(nodes=(NodeView("a", memory_bytes=10 * GIB),))
    pod = engine_pod(resources=bounded("8Gi", "8Gi"))
    assert memory_of(injected(pod, pool)) == ("8320Mi", "8320Mi")
    more: tuple[Manifest, ...] = (
        {"containers": [*pod["spec"]["containers"], {"name": "log", "resources": bounded("2Gi", "2Gi")}]},
        {"initContainers": [{"name": "log", "restartPolicy": "Always", "resources": bounded("", "2Gi")}]},
        {"overhead": {"memory": "2Gi"}},
    )
    for spec in more:
        assert memory_of(injected({**pod, "spec": {**pod["spec"], **spec}}, pool)) == ("8Gi", "8Gi")


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1Gi", 1 << 30),
        ("512M", 512_000_000),
        ("1.5Ki", 1536),
        ("1e3", 1000),
        ("100m", None),
        ("3000m", 3),
        ("2e9u", 2000),
        ("1E", 10**18),
        ("1E2", 100),
        ("7Ei", 7 << 60),
        ("8Ei", None),
        (".5Gi", 1 << 29),
        ("+1k", 1000),
        ("-1", None),
        ("1e999999", None),
        ("Infinity", None),
        ("NaN", None),
        ("1_0", None),
        ("1 Gi", None),
        ("1ki", None),
        ("", None),
        ("x", None),
        (None, None),
    ],
)
def test_quantities_of_memory_are_read(text: object, amount: int | None) -> None:
    assert memory_bytes(text) == amount
