"""What the webhook is told of pools."""

from __future__ import annotations

from typing import Any

from kvpool_operator import names
from kvpool_operator.directory import Directory
from kvpool_operator.webhook.views import PoolView
from tests.unit.fake_api_server import FakeApiServer, fake_api_server
from tests.unit.operator_pools import SETTINGS, UID, make_pool, manifest

READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
NO_IMAGE = {"containerStatuses": [{"name": "agent", "state": {"waiting": {"reason": "ErrImagePull"}}}]}
OWNER = {"kind": "DaemonSet", "name": "chat-agent", "uid": "d", "controller": True}


def put_agent(api: FakeApiServer, namespace: str, owners: list[dict[str, Any]], status: dict[str, Any]) -> None:
    """A pod with an agent's labels."""
    meta = {
        "namespace": namespace,
        "name": f"agent-{len(api.objects)}",
        "labels": names.labels(make_pool(), names.AGENT),
        "ownerReferences": owners,
    }
    spec = {"nodeName": "node-1", "containers": [{"name": "agent", "image": "kvpool:test"}]}
    api.put({"kind": "Pod", "metadata": meta, "spec": spec, "status": status})


def view(api: FakeApiServer) -> PoolView:
    """The pool as the webhook sees it."""
    directory = Directory(api.kube(), SETTINGS)
    directory.refresh()
    found = directory.find_pool("inference", "chat")
    assert found is not None
    return found


def test_agents_are_the_pods_of_the_pools_own_daemon_set() -> None:
    with fake_api_server() as api:
        api.put({"kind": "Namespace", "metadata": {"name": "inference"}})
        api.put({"kind": "Node", "metadata": {"name": "node-1"}, "status": {}})
        assert api.put(manifest())["metadata"]["uid"] == UID
        put_agent(api, "inference", [OWNER], READY)
        for namespace, owners in (("attacker", [OWNER]), ("inference", []), ("inference", [{**OWNER, "name": "x"}])):
            put_agent(api, namespace, owners, READY)
            put_agent(api, namespace, owners, NO_IMAGE)

        seen = view(api)
        assert (seen.ready_agents, seen.nodes_without_image) == (1, ())

        put_agent(api, "inference", [OWNER], NO_IMAGE)
        assert [node.name for node in view(api).nodes_without_image] == ["node-1"]
