"""What one look at a pool does, against an API server's HTTP interface."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import pytest

from kvpool_operator import agent_stats, names, reasons
from kvpool_operator.kube_errors import ForbiddenError, UnavailableError
from kvpool_operator.observed import AgentStats, Pod
from kvpool_operator.resources import RESOURCES
from tests.unit.fake_api_server import FakeApiServer, Refusal
from tests.unit.operator_pools import MANAGED, UID, manifest
from tests.unit.played_cluster import (
    KEY,
    Movable,
    condition,
    operator,
    settled,
)


def test_pool_becomes_ready_and_then_nothing_is_written(api: FakeApiServer) -> None:
    operating = settled(api)
    assert condition(api, reasons.READY)["status"] == "True"
    before = len(api.writes)

    assert operating.reconcile(KEY) is None

    assert len(api.writes) == before


def test_status_says_url_generation_and_counts(api: FakeApiServer) -> None:
    settled(api)

    pool = api.find("KVCachePool", "chat")
    assert pool is not None
    status = pool["status"]
    assert status["routing"] == {"url": "http://chat-router.inference.svc"}
    assert status["observedGeneration"] == pool["metadata"]["generation"]
    assert status["summary"] == {"message": "1 of 1 agents are ready", "agents": "1/1", "valkey": "None"}
    assert status["agents"]["image"] == "kvpool:test"


def test_secrets_are_written_without_being_read(api: FakeApiServer) -> None:
    settled(api, valkey=MANAGED)

    assert {"chat-token", "chat-valkey", f"kvpool-{UID}"} == set(api.names("Secret"))


def test_new_operator_changes_nothing(api: FakeApiServer) -> None:
    settled(api, valkey=MANAGED)
    before = {key: one["metadata"]["resourceVersion"] for key, one in api.objects.items() if key[0] != "Event"}

    operator(api).reconcile(KEY)

    after = {key: one["metadata"]["resourceVersion"] for key, one in api.objects.items() if key[0] != "Event"}
    assert {key: one for key, one in after.items() if key[0] != "KVCachePool"} == {
        key: one for key, one in before.items() if key[0] != "KVCachePool"
    }


@pytest.mark.parametrize(
    ("kind", "name"), [("ConfigMap", "chat-agent"), ("Secret", "chat-token"), ("Service", "chat-router")]
)
def test_foreign_object_of_the_same_name_is_left_alone_and_named(api: FakeApiServer, kind: str, name: str) -> None:
    api.put({"kind": kind, "metadata": {"namespace": "inference", "name": name}, "data": {"theirs": "1"}})
    api.put(manifest())

    operator(api).reconcile(KEY)

    live = api.find(kind, name)
    assert live is not None
    assert live["data"] == {"theirs": "1"}
    assert "labels" not in live["metadata"]
    accepted = condition(api, reasons.SPEC_ACCEPTED)
    assert (accepted["status"], accepted["reason"]) == ("False", reasons.NAME_CONFLICT)
    assert f"{kind} inference/{name}" in accepted["message"]
    assert api.find("DaemonSet", "chat-agent") is not None


def test_objects_of_a_former_pool_are_waited_for(api: FakeApiServer) -> None:
    settled(api)
    api.remove("KVCachePool", "chat")
    api.put(manifest(metadata={"uid": "new-uid"}))
    former = api.find("DaemonSet", "chat-agent")
    operating = operator(api)

    operating.reconcile(KEY)

    assert api.find("DaemonSet", "chat-agent") == former
    assert condition(api, reasons.SPEC_ACCEPTED)["reason"] == reasons.FORMER_OBJECTS_GOING
    for kind, _, name in [key for key in api.objects if key[0] not in ("Node", "Namespace", "KVCachePool", "Event")]:
        if kind not in ("ClusterRoleBinding",):  # what the garbage collector does
            api.remove(kind, name)
            api.remove(kind, name, "kvpool-system")
    operating.reconcile(KEY)
    operating.reconcile(KEY)
    made = api.find("DaemonSet", "chat-agent")
    assert made is not None
    assert made["metadata"]["labels"][names.POOL_UID_LABEL] == "new-uid"
    binding = api.find("ClusterRoleBinding", "kvpool:inference:chat:agent")
    assert binding is not None
    assert binding["metadata"]["labels"][names.POOL_UID_LABEL] == "new-uid"


@pytest.mark.parametrize("owners", [[], [{"kind": names.KIND, "name": "chat", "uid": UID}]])
def test_copies_of_our_objects_are_left_alone(api: FakeApiServer, owners: list[dict[str, Any]]) -> None:
    api.put({"kind": "Namespace", "metadata": {"name": "team"}})
    operating = settled(api)
    ours = api.find("Service", "chat-router")
    assert ours is not None
    meta = {"labels": ours["metadata"]["labels"]}
    api.put(
        {"kind": "Service", "metadata": {**meta, "namespace": "inference", "name": "my-lb", "ownerReferences": owners}}
    )
    api.put({"kind": "RoleBinding", "metadata": {**meta, "namespace": "team", "name": "chat-router"}})
    api.put({"kind": "ClusterRoleBinding", "metadata": {**meta, "name": "mine"}})

    operating.reconcile(KEY)
    api.remove("KVCachePool", "chat")
    operating.reconcile(KEY)

    assert api.find("Service", "my-lb") is not None
    assert api.find("RoleBinding", "chat-router", "team") is not None
    assert api.names("ClusterRoleBinding") == ["mine"]


def test_what_is_planned_no_more_is_removed(api: FakeApiServer) -> None:
    operating = settled(api, valkey=MANAGED)
    pool = manifest(routing={"mode": "Disabled"})
    api.put({**pool, "status": {}})

    operating.reconcile(KEY)

    assert api.names("Deployment") == []
    assert api.names("StatefulSet") == []
    assert api.names("RoleBinding") == []
    assert "chat-valkey" not in api.names("Secret")
    live = api.find("KVCachePool", "chat")
    assert live is not None
    assert "routing" not in live["status"]


def test_bindings_in_other_namespaces_come_and_go_with_the_selector(api: FakeApiServer) -> None:
    api.put({"kind": "Namespace", "metadata": {"name": "team", "labels": {"team": "a"}}})
    chosen = {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}
    operating = settled(api, allowedNamespaces=chosen)
    assert api.find("RoleBinding", "kvpool:inference:chat:router", "team") is not None
    listed = api.find("ConfigMap", "chat-namespaces")
    assert listed is not None
    assert listed["data"]["allowed"] == "team\n"

    api.put({"kind": "Namespace", "metadata": {"name": "team", "labels": {}}})
    operating.reconcile(KEY)

    assert api.find("RoleBinding", "kvpool:inference:chat:router", "team") is None
    assert api.find("RoleBinding", "chat-router") is not None


def test_paused_pool_is_left_alone(api: FakeApiServer) -> None:
    operating = settled(api)
    api.put({**manifest(metadata={"annotations": {"kvpool.io/reconcile": "paused"}}, routing={"mode": "Disabled"})})

    operating.reconcile(KEY)

    assert api.names("Deployment") == ["chat-router"]
    assert condition(api, reasons.SPEC_ACCEPTED)["reason"] == reasons.PAUSED


@pytest.mark.parametrize(("code", "named"), [(400, "spec.agent.nodeSelector"), (403, "ClusterRole")])
def test_nodes_that_cannot_be_read_are_told_and_keep_nothing_else_back(
    api: FakeApiServer, code: int, named: str
) -> None:
    operating = settled(api)
    api.remove("Service", "chat-router")
    api.refused_reads["Node"] = code

    operating.reconcile(KEY)

    accepted = condition(api, reasons.SPEC_ACCEPTED)
    assert (accepted["status"], accepted["reason"]) == ("False", reasons.REQUEST_REFUSED)
    assert named in accepted["message"]
    assert condition(api, reasons.READY)["status"] == "False"
    assert api.find("Service", "chat-router") is not None
    assert api.find("Pod", "chat-agent-x") is not None
    told = [one for key, one in api.objects.items() if key[0] == "Event"]
    assert reasons.REQUEST_REFUSED in {one["reason"] for one in told}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (500, 'Internal error occurred: failed calling webhook "x.example": connection refused'),
        (500, "admission webhook x denied the request: no"),
        (429, "admission webhook x denied the request: not now"),
        (404, "admission webhook x denied the request: no"),
        (422, "ValidatingAdmissionPolicy 'x' with binding 'y' denied request: no"),
    ],
)
def test_what_admission_keeps_from_being_written_is_told_and_keeps_nothing_else_back(
    api: FakeApiServer, code: int, message: str
) -> None:
    operating = settled(api)
    config = api.find("ConfigMap", "chat-agent")
    assert config is not None
    api.put({**config, "data": {}})
    api.remove("Service", "chat-router")

    def refuse(method: str, kind: str, _name: str) -> None:
        if kind == "ConfigMap" and method != "DELETE":
            raise Refusal(code, message)

    api.on_write = refuse
    operating.reconcile(KEY)

    accepted = condition(api, reasons.SPEC_ACCEPTED)
    assert (accepted["status"], accepted["reason"]) == ("False", reasons.APPLY_REFUSED)
    assert "ConfigMap inference/chat-agent" in accepted["message"]
    assert message in accepted["message"]
    assert condition(api, reasons.READY)["status"] == "False"
    assert api.find("Service", "chat-router") is not None
    assert api.find("ConfigMap", "chat-agent") is not None, "what cannot be made anew is not deleted"


@pytest.mark.parametrize("kind", ["Namespace", "Pod", "Event"])
def test_request_without_which_nothing_can_be_done_is_told_and_tried_again(api: FakeApiServer, kind: str) -> None:
    operating = settled(api)
    pod = api.find("Pod", "chat-agent-x")
    assert pod is not None
    api.put({**pod, "status": {"phase": "Pending"}})  # so that Events are asked for
    api.refused_reads[kind] = 403

    for _ in range(2):
        with pytest.raises(ForbiddenError):
            operating.reconcile(KEY)

    ready = condition(api, reasons.READY)
    assert (ready["status"], ready["reason"]) == ("False", reasons.REQUEST_REFUSED)
    assert RESOURCES[kind].plural in condition(api, reasons.SPEC_ACCEPTED)["message"]
    assert condition(api, reasons.VALKEY_AVAILABLE)["status"] == "True"


def test_pool_that_stays_broken_is_looked_at_less_and_less_until_something_changes(api: FakeApiServer) -> None:
    operating = settled(api, agent={"nodeSelector": {"gpu": "no"}})
    daemon_set = api.find("DaemonSet", "chat-agent")
    assert daemon_set is not None
    daemon_set["status"] = {"observedGeneration": daemon_set["metadata"]["generation"]}
    clock = cast(Movable, operating._clock)

    pauses: list[float] = []
    for _ in range(30):
        pauses.append(operating.reconcile(KEY) or 0)
        clock.now += timedelta(seconds=pauses[-1])

    assert condition(api, reasons.READY)["reason"] == reasons.NO_NODE_MATCHES
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (2, 30)
    assert all(pause <= max(2, sum(pauses[:number]) / 4 + 0.01) for number, pause in enumerate(pauses)), (
        "late by a quarter at most"
    )
    api.put(manifest(agent={"nodeSelector": {"gpu": "yes"}}))
    assert operating.reconcile(KEY) == 2


def test_pool_that_gets_on_is_looked_at_often(api: FakeApiServer) -> None:
    api.put(manifest())
    operating = operator(api)
    clock = cast(Movable, operating._clock)

    for _ in range(5):
        assert operating.reconcile(KEY) == 2
        clock.now += timedelta(seconds=2)


def test_change_is_not_called_rolled_out_before_the_daemon_set_controller_saw_it(api: FakeApiServer) -> None:
    operating = settled(api, routing={"mode": "Disabled"})
    api.put(manifest(ram={"capacityPerNode": "2Gi"}, routing={"mode": "Disabled"}))

    operating.reconcile(KEY)

    assert condition(api, reasons.ROLLOUT_COMPLETE)["status"] == "False"
    assert condition(api, reasons.ROLLOUT_COMPLETE)["reason"] == reasons.ROLLING_OUT


def test_token_goes_to_no_pod_that_only_has_the_labels_of_an_agent_and_to_none_on_a_node_that_is_away(
    api: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask_all(pods: Sequence[Pod], _token: str) -> dict[str, AgentStats]:
        asked.extend(pod.name for pod in pods)
        return {}

    monkeypatch.setattr(agent_stats, "ask_all", ask_all)
    operating = settled(api)
    pod, node = api.find("Pod", "chat-agent-x"), api.find("Node", "node-1")
    assert pod is not None
    assert node is not None
    meta = {**pod["metadata"], "name": "fake", "uid": "fake"}
    api.put({**pod, "metadata": {**meta, "ownerReferences": []}})
    asked.clear()

    operating.reconcile(KEY)
    assert asked == ["chat-agent-x"]
    agents = (api.find("KVCachePool", "chat") or {})["status"]["agents"]
    assert (agents["ready"], agents["updated"]) == (1, 1)

    api.put({**node, "status": {**node["status"], "conditions": [{"type": "Ready", "status": "Unknown"}]}})
    asked.clear()
    operating.reconcile(KEY)
    assert asked == []


@pytest.mark.parametrize("others", [0, 12])
def test_engines_count_only_where_the_pool_may_be_used(api: FakeApiServer, others: int) -> None:
    chosen = {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}
    for name in ("inference", *(f"team-{number}" for number in range(others))):
        api.put({"kind": "Namespace", "metadata": {"name": name, "labels": {"team": "a"}}})
    labels = {names.ROLE_LABEL: "engine", names.POOL_LABEL: "chat", names.POOL_NAMESPACE_LABEL: "inference"}
    for namespace in ("inference", "attacker"):
        meta = {"namespace": namespace, "name": "engine", "labels": labels}
        api.put({"kind": "Pod", "metadata": meta, "spec": {"nodeName": "elsewhere"}, "status": {"phase": "Running"}})

    settled(api, allowedNamespaces=chosen)

    assert (api.find("KVCachePool", "chat") or {})["status"]["agents"]["enginesWithoutAgent"] == 1


def test_pool_that_only_labels_name_costs_one_request(api: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    operating = settled(api)
    monkeypatch.setattr(FakeApiServer, "_list", lambda *_: pytest.fail("a list"))

    assert operating.reconcile(("inference", "made-up")) is None


@pytest.mark.parametrize("seed", range(5))
def test_operator_killed_at_random_points_comes_to_the_same_objects(api: FakeApiServer, seed: int) -> None:
    api.put(manifest(valkey=MANAGED, allowedNamespaces={"from": "All"}))
    operator(api).reconcile(KEY)
    wanted = described(api)
    for kind, namespace, name in list(api.objects):
        if kind not in ("Node", "Namespace", "KVCachePool") and name != f"kvpool-{UID}":
            api.remove(kind, name, namespace)
    chance = random.Random(seed)

    def kill(_method: str, _kind: str, _name: str) -> None:
        if chance.random() < 0.2:
            raise Refusal(503, "killed")

    api.on_write = kill
    for _ in range(20):
        with contextlib.suppress(UnavailableError):
            operator(api).reconcile(KEY)
    api.on_write = lambda _method, _kind, _name: None
    operator(api).reconcile(KEY)

    assert described(api) == wanted


def described(api: FakeApiServer) -> dict[Any, Any]:
    """Objects without what the server numbers."""
    return {
        key: {part: value for part, value in one.items() if part != "metadata"}
        for key, one in api.objects.items()
        if key[0] not in ("Event", "KVCachePool")
    }
