"""How rollouts of agents follow on each other, within a pool and from pool to pool."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from kvpool_operator import agent_stats, names, reasons
from kvpool_operator.kube_errors import ForbiddenError
from kvpool_operator.reconcile import Reconciler
from tests.unit.fake_api_server import FakeApiServer, Refusal
from tests.unit.operator_pools import SETTINGS, UID, manifest
from tests.unit.played_cluster import KEY, condition, deleted, operator, run_daemon_set, run_deployment, settled

OTHER = ("inference", "other")


def test_outdated_agent_is_deleted_once_and_others_wait_for_it(api: FakeApiServer) -> None:
    operating = settled(api)
    api.put(manifest(ram={"capacityPerNode": "2Gi"}))

    operating.reconcile(KEY)
    run_daemon_set(api)
    operating.reconcile(KEY)

    assert api.find("Pod", "chat-agent-x") is None
    assert condition(api, reasons.ROLLOUT_COMPLETE)["reason"] == reasons.ROLLING_OUT
    run_daemon_set(api)
    run_deployment(api)
    operating.reconcile(KEY)
    assert condition(api, reasons.ROLLOUT_COMPLETE)["status"] == "True"


@pytest.mark.parametrize("end", ["ready", "paused", "not understood", "deleted", "node lost"])
def test_pool_whose_rollout_does_not_go_on_lets_the_next_one_roll(api: FakeApiServer, end: str) -> None:
    operating = two_outdated_pools(api)

    if end == "ready":
        run_daemon_set(api)
    elif end == "paused":
        api.put(manifest(metadata={"annotations": {"kvpool.io/reconcile": "paused"}}))
    elif end == "not understood":
        put_pool(api, "chat", capacity="2")
    elif end == "deleted":
        deleted(api, metadata={"finalizers": ["theirs"]})
    else:
        make_outdated_agent_on_a_lost_node(api)
    operating.reconcile(KEY)
    operating.reconcile(OTHER)

    assert api.find("Pod", "other-agent-x") is None


def two_outdated_pools(api: FakeApiServer) -> Reconciler:
    """Two pools with agents of the former template; the first one's rollout has begun."""
    operating = settled(api, routing={"mode": "Disabled"})
    put_pool(api, "other")
    operating.reconcile(OTHER)
    run_daemon_set(api, "other")
    for name in ("chat", "other"):
        put_pool(api, name, capacity="2Gi")
        operating.reconcile(("inference", name))
        run_daemon_set(api, name, make=False)
    operating.reconcile(KEY)
    assert api.find("Pod", "chat-agent-x") is None
    assert api.find("Pod", "other-agent-x") is not None
    return operating


@pytest.mark.parametrize("is_last_on_its_way", [False, True])
def test_new_leader_knows_of_a_rollout_that_its_predecessor_began(
    api: FakeApiServer, *, is_last_on_its_way: bool
) -> None:
    two_outdated_pools(api)
    if is_last_on_its_way:
        run_daemon_set(api, ready=False)
    successor = operator(api, others=(KEY, OTHER))

    for key in (OTHER, KEY, OTHER, KEY, OTHER):
        successor.reconcile(key)

    assert api.find("Pod", "other-agent-x") is not None
    assert rollout_reason(api, "other") == reasons.WAITING_FOR_OTHER_POOL
    api.remove("Pod", "chat-agent-x")
    run_daemon_set(api)
    for key in (KEY, OTHER):
        successor.reconcile(key)
    assert api.find("Pod", "other-agent-x") is None


def test_upgraded_leader_knows_of_a_rollout_although_it_changes_every_template(api: FakeApiServer) -> None:
    two_outdated_pools(api)
    successor = operator(api, settings=replace(SETTINGS, image="kvpool:2"), others=(KEY, OTHER))

    for key in (KEY, OTHER):
        successor.reconcile(key)
    run_daemon_set(api, make=False)
    run_daemon_set(api, "other", make=False)
    for key in (OTHER, KEY, OTHER):
        successor.reconcile(key)

    assert api.find("Pod", "other-agent-x") is not None
    assert rollout_reason(api, "other") == reasons.WAITING_FOR_OTHER_POOL


@pytest.mark.parametrize("is_refused", [True, False])
def test_agent_is_drained_only_when_it_may_be_deleted(
    api: FakeApiServer, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    drained: list[str] = []
    monkeypatch.setattr(agent_stats, "drain", lambda ip, *_args, **_options: drained.append(ip))
    operating = settled(api)
    pod = api.find("Pod", "chat-agent-x")
    assert pod is not None
    api.put({**pod, "status": {**pod["status"], "podIP": "127.0.0.1"}})
    api.put(manifest(ram={"capacityPerNode": "2Gi"}))

    def refuse(kind: str, _name: str) -> None:
        if kind == "Pod" and is_refused:
            raise Refusal(403, "admission webhook x denied the request: not today")

    api.on_dry_delete = refuse
    operating.reconcile(KEY)
    run_daemon_set(api)
    with pytest.raises(ForbiddenError) if is_refused else contextlib.nullcontext():
        operating.reconcile(KEY)

    assert drained == ([] if is_refused else ["127.0.0.1"])
    assert (api.find("Pod", "chat-agent-x") is not None) == is_refused
    if is_refused:
        assert "not today" in condition(api, reasons.READY)["message"]


def test_pool_that_cannot_be_looked_at_keeps_no_other_from_rolling(api: FakeApiServer) -> None:
    two_outdated_pools(api)
    put_pool(api, "chat", capacity="wrong")
    successor = operator(api, others=(KEY, OTHER))

    successor.reconcile(OTHER)
    assert api.find("Pod", "other-agent-x") is not None
    for key in (KEY, OTHER):
        successor.reconcile(key)

    assert api.find("Pod", "other-agent-x") is None


def rollout_reason(api: FakeApiServer, pool: str) -> str:
    """Where a rollout stands."""
    live = api.find("KVCachePool", pool)
    assert live is not None
    (reason,) = [one["reason"] for one in live["status"]["conditions"] if one["type"] == reasons.ROLLOUT_COMPLETE]
    return str(reason)


def put_pool(api: FakeApiServer, name: str, *, capacity: str = "1Gi") -> None:
    """A pool without router."""
    meta = {"name": name, "uid": UID if name == "chat" else name}
    api.put(manifest(metadata=meta, routing={"mode": "Disabled"}, ram={"capacityPerNode": capacity}))


def make_outdated_agent_on_a_lost_node(api: FakeApiServer) -> None:
    """The one agent that is left to be replaced cannot be; all others are as they should be."""
    run_daemon_set(api)
    pod = api.find("Pod", "chat-agent-x")
    assert pod is not None
    lost = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    api.put({"kind": "Node", "metadata": {"name": "node-2", "labels": {"gpu": "yes"}}, "status": lost})
    meta = {**pod["metadata"], "name": "chat-agent-y", "uid": "y", "annotations": {names.CONFIG_HASH: "old"}}
    api.put({**pod, "metadata": meta, "spec": {**pod["spec"], "nodeName": "node-2"}})
