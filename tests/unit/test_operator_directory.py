"""What the webhook is told of pools: their agents, the nodes with their memory, and where the image is shown to be had."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_operator.directory import Directory
from kvpool_operator.webhook.views import NodeView, PoolView
from tests.unit.fake_api_server import fake_api_server
from tests.unit.operator_pools import SETTINGS, UID, manifest

AGENT = {
    "app.kubernetes.io/component": "agent",
    "app.kubernetes.io/managed-by": "kvpool-operator",
    "kvpool.io/pool-uid": UID,
}
OWNER = {"kind": "DaemonSet", "name": "chat-agent", "uid": "of-the-set", "controller": True}
RAN = {"containerStatuses": [{"name": "agent", "lastState": {"terminated": {"exitCode": 1}}, "state": {"waiting": {}}}]}
READY = {
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [{"name": "agent", "ready": True, "state": {"running": {}}}],
}
NO_IMAGE = {"containerStatuses": [{"name": "agent", "state": {"waiting": {"reason": "ErrImageNeverPull"}}}]}


def agent_pod(
    node: str, status: dict[str, Any], image: str = SETTINGS.image, *, namespace: str = "inference", owner: Any = OWNER
) -> dict[str, Any]:
    """A pod with an agent's labels."""
    return {
        "kind": "Pod",
        "metadata": {
            "namespace": namespace,
            "name": f"chat-agent-{node}",
            "labels": AGENT,
            "ownerReferences": [owner] if owner else [],
        },
        "spec": {"nodeName": node, "containers": [{"name": "agent", "image": image}]},
        "status": status,
    }


def view_of(*pods: dict[str, Any]) -> PoolView:
    """The pool on a cluster of nodes a, b, c and d."""
    with fake_api_server() as server:
        for name in "abcd":
            server.put({"kind": "Node", "metadata": {"name": name}, "status": {"allocatable": {"memory": "1Gi"}}})
        server.put({"kind": "Namespace", "metadata": {"name": "inference"}})
        server.put(manifest())
        for pod in pods:
            server.put(pod)
        directory = Directory(server.kube(), SETTINGS)
        directory.refresh()
        found = directory.find_pool("inference", "chat")
    assert found is not None
    return found


def test_a_ready_agent_shows_that_its_node_has_the_image_and_one_without_it_that_it_has_not() -> None:
    view = view_of(
        agent_pod("a", READY), agent_pod("b", NO_IMAGE), agent_pod("c", {}), agent_pod("d", READY, "kvpool:old")
    )
    assert view.nodes_with_image == {"a"}
    assert view.ready_agents == 1
    assert [node.name for node in view.nodes_without_image] == ["b"]


def test_an_agent_that_restarts_has_shown_that_its_node_has_the_image() -> None:
    view = view_of(agent_pod("a", RAN))
    assert view.nodes_with_image == {"a"}
    assert view.ready_agents == 0


FORMER = SETTINGS.image + "-former"


def test_images_of_a_pool_that_is_not_rolled_yet_are_those_that_its_ready_agents_run() -> None:
    view = view_of(
        agent_pod("a", READY, FORMER),
        agent_pod("b", READY, FORMER),
        agent_pod("c", RAN, FORMER),
        agent_pod("d", READY, FORMER, namespace="attacker"),
    )
    assert (view.image, view.ready_agents) == (SETTINGS.image, 0)
    [former] = view.former_images
    assert (former.image, former.ready_agents, former.nodes_with_image) == (FORMER, 2, frozenset("abc"))
    assert (former.namespace, former.name, former.nodes) == (view.namespace, view.name, view.nodes)


@pytest.mark.parametrize("image", ["elsewhere.example.com/kvpool:1", SETTINGS.image.partition(":")[0] + "x:1"])
def test_an_image_of_another_repository_is_not_taken_from_what_looks_like_an_agent(image: str) -> None:
    """Whoever may make pods in the pool's namespace could have it run in others."""
    assert view_of(agent_pod("a", READY), agent_pod("b", READY, image)).former_images == ()


def test_every_node_is_known_with_its_memory() -> None:
    assert view_of().nodes == tuple(
        NodeView(name, allocatable=frozenset({"memory"}), memory_bytes=1 << 30) for name in "abcd"
    )


@pytest.mark.parametrize(
    "forged",
    [
        {"namespace": "attacker"},
        {"owner": None},
        {"owner": {**OWNER, "name": "x"}},
        {"owner": {**OWNER, "controller": False}},
    ],
)
def test_agents_are_the_pods_of_the_pools_own_daemon_set(forged: dict[str, Any]) -> None:
    view = view_of(agent_pod("a", READY), agent_pod("b", READY, **forged), agent_pod("c", NO_IMAGE, **forged))
    assert (view.ready_agents, view.nodes_without_image) == (1, ())
