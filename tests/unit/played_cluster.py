"""A cluster's controllers and a newly started operator, played for tests of the reconciler against an API server's HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kvpool_operator.fence import Fence, OpenFence
from kvpool_operator.observed import Pod, ValkeyHealth
from kvpool_operator.reconcile import Key, Reconciler
from kvpool_operator.settings import Settings
from kvpool_operator.story import Storyteller
from tests.unit.fake_api_server import FakeApiServer
from tests.unit.operator_pools import SETTINGS, manifest

KEY = ("inference", "chat")
NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


class Movable:
    """A clock that tests move."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


class Healthy:
    """Every shard is well."""

    replicas: int | None = None
    are_refusing: bool = False

    def __call__(self, pods: Sequence[Pod], *, shards: int, password: str, fence: Fence) -> ValkeyHealth:
        assert pods
        assert password
        assert fence.remaining_seconds() > 0
        refusing = frozenset(pod.uid for pod in pods) if self.are_refusing else frozenset[str]()
        return ValkeyHealth(
            shards=shards, ready=shards, slots_covered=16384, replicas=self.replicas or shards, refusing=refusing
        )


def operator(
    api: FakeApiServer,
    *,
    now: datetime = NOW,
    heal: Healthy | None = None,
    settings: Settings = SETTINGS,
    others: tuple[Key, ...] = (),
) -> Reconciler:
    """A newly started one: it remembers nothing. others: pools that it has to look at before it rolls any."""
    kube = api.kube(OpenFence())
    story = Storyteller(kube, identity="me", monotonic=lambda: 0.0, wall_clock=lambda: "2026-01-01T12:00:00Z")
    reconciler = Reconciler(kube, settings, fence=OpenFence(), story=story, heal=heal or Healthy(), clock=Movable(now))
    reconciler.expect(others)
    return reconciler


def condition(api: FakeApiServer, kind: str) -> dict[str, Any]:
    """A condition of the pool."""
    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    return next(one for one in pool["status"]["conditions"] if one["type"] == kind)


def made_by(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The owner references of a pod of it."""
    meta = workload["metadata"]
    return [{"kind": workload["kind"], "name": meta["name"], "uid": meta["uid"], "controller": True}]


def run_daemon_set(api: FakeApiServer, pool: str = "chat", *, ready: bool = True, make: bool = True) -> dict[str, Any]:
    """Play the DaemonSet controller and the kubelet of one node. make: whether a missing pod is made."""
    daemon_set = api.find("DaemonSet", f"{pool}-agent")
    assert daemon_set is not None
    daemon_set["status"] = {
        "desiredNumberScheduled": 1,
        "currentNumberScheduled": 1,
        "observedGeneration": daemon_set["metadata"]["generation"],
    }
    if make and api.find("Pod", f"{pool}-agent-x") is None:
        template = daemon_set["spec"]["template"]
        api.put(
            {
                "kind": "Pod",
                "metadata": {
                    **template["metadata"],
                    "namespace": "inference",
                    "name": f"{pool}-agent-x",
                    "ownerReferences": made_by(daemon_set),
                },
                "spec": {"nodeName": "node-1", "containers": template["spec"]["containers"]},
                "status": {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
                },
            }
        )
    return daemon_set


def run_deployment(api: FakeApiServer) -> None:
    """Play the Deployment controller."""
    deployment = api.find("Deployment", "chat-router")
    assert deployment is not None
    wanted = deployment["spec"]["replicas"]
    deployment["status"] = {
        "replicas": wanted,
        "readyReplicas": wanted,
        "updatedReplicas": wanted,
        "observedGeneration": deployment["metadata"]["generation"],
    }


def settled(api: FakeApiServer, **spec: Any) -> Reconciler:
    """A pool that is as it should be, and its operator."""
    api.put(manifest(**spec))
    operating = operator(api)
    operating.reconcile(KEY)
    run_daemon_set(api)
    if api.find("Deployment", "chat-router") is not None:
        run_deployment(api)
    operating.reconcile(KEY)
    return operating


def deleted(api: FakeApiServer, **changes: Any) -> None:
    """Delete the pool, changed by somebody meanwhile."""
    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    meta = {**pool["metadata"], "deletionTimestamp": "2026-01-01T11:00:00Z", **changes.pop("metadata", {})}
    api.put({**pool, "metadata": meta, "spec": {**pool["spec"], **changes}})
