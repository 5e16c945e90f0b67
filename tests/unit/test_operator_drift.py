"""What somebody else changed in a pool's objects is put back, also in fields that nobody but they ever set."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_operator import reasons
from tests.unit.fake_api_server import FakeApiServer, Refusal
from tests.unit.operator_pools import MANAGED
from tests.unit.played_cluster import KEY, condition, settled


@pytest.mark.parametrize(
    ("kind", "name", "part", "edit"),
    [
        ("ConfigMap", "chat-agent", "data", {"agent.yaml": "broken"}),
        ("Service", "chat-router", "spec", {"ports": []}),
        ("Deployment", "chat-router", "spec", {"replicas": 0}),
        ("Deployment", "chat-router", "spec", {"paused": True}),
        ("Deployment", "chat-router", "spec", {"minReadySeconds": 3600}),
        ("Deployment", "chat-router", "spec", {"template": {"spec": {"nodeSelector": {"none": "such"}}}}),
        ("DaemonSet", "chat-agent", "spec", {"template": {"spec": {"nodeSelector": {"none": "such"}}}}),
        ("DaemonSet", "chat-agent", "spec", {"updateStrategy": {"type": "RollingUpdate"}}),
        ("StatefulSet", "chat-valkey", "spec", {"replicas": 0}),
        ("StatefulSet", "chat-valkey", "spec", {"updateStrategy": {"rollingUpdate": {"partition": 9}}}),
        ("StatefulSet", "chat-valkey", "spec", {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}),
        ("StatefulSet", "chat-valkey", "spec", {"ordinals": {"start": 5}}),
        ("Service", "chat-router", "spec", {"selector": {"app": "theirs"}}),
        ("Service", "chat-router", "spec", {"type": "ExternalName"}),
        ("Service", "chat-router", "spec", {"sessionAffinity": "ClientIP"}),
        ("Service", "chat-router", "spec", {"externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local"}),
        ("Secret", "chat-token", "data", {"token": "stolen"}),
        ("ServiceAccount", "chat-agent", "automountServiceAccountToken", True),
    ],
)
def test_hand_edit_is_put_back_and_told(api: FakeApiServer, kind: str, name: str, part: str, edit: Any) -> None:
    operating = settled(api, valkey=MANAGED, routing={"service": {"type": "NodePort"}})
    live = api.find(kind, name)
    assert live is not None
    wanted = live[part]
    api.put({**live, part: edited(wanted, edit)})

    operating.reconcile(KEY)

    now = api.find(kind, name)
    assert now is not None
    assert now[part] == wanted
    told = [one for key, one in api.objects.items() if key[0] == "Event"]
    assert [one["message"] for one in told if one["reason"] == reasons.DRIFT_CORRECTED] == [
        f"{kind} inference/{name} was changed by somebody else and is put back: change the pool instead"
    ]


def edited(part: Any, edit: Any) -> Any:
    """A part of an object with some fields changed."""
    if not isinstance(part, dict) or not isinstance(edit, dict):
        return edit
    return {**part, **{key: edited(part.get(key), value) for key, value in edit.items()}}


def test_object_of_somebody_else_that_came_while_ours_was_put_back_is_left_alone(api: FakeApiServer) -> None:
    operating = settled(api)
    live = api.find("Service", "chat-router")
    assert live is not None
    api.put({**live, "spec": {**live["spec"], "ports": []}})
    theirs = {"kind": "Service", "metadata": {"namespace": "inference", "name": "chat-router"}, "spec": {"theirs": 1}}

    def replace_first(method: str, kind: str, _name: str) -> None:
        if (method, kind) == ("PATCH", "Service"):
            api.on_write = lambda _method, _kind, _name: None
            api.remove("Service", "chat-router")
            api.put(theirs)

    api.on_write = replace_first
    operating.reconcile(KEY)

    now = api.find("Service", "chat-router")
    assert now is not None
    assert now["spec"] == {"theirs": 1}
    assert condition(api, reasons.SPEC_ACCEPTED)["reason"] == reasons.NAME_CONFLICT


@pytest.mark.parametrize(("kind", "name"), [("ConfigMap", "chat-agent"), ("Secret", "chat-token")])
def test_object_that_is_deleted_while_it_is_put_back_is_made_anew_at_once(
    api: FakeApiServer, kind: str, name: str
) -> None:
    operating = settled(api)
    live = api.find(kind, name)
    assert live is not None
    api.put({**live, "data": {"broken": ""}})

    def delete_first(method: str, written: str, which: str) -> None:
        if (method, written, which) == ("PATCH", kind, name):
            api.on_write = lambda _method, _kind, _name: None
            api.remove(kind, name)

    api.on_write = delete_first
    operating.reconcile(KEY)

    now = api.find(kind, name)
    assert now is not None
    assert now["data"] == live["data"]
    assert now["metadata"]["uid"] != live["metadata"]["uid"]
    assert condition(api, reasons.SPEC_ACCEPTED)["status"] == "True"


def test_edit_that_cannot_be_put_back_has_the_object_made_anew(api: FakeApiServer) -> None:
    operating = settled(api)
    live = api.find("ConfigMap", "chat-agent")
    assert live is not None
    api.put({**live, "data": {"agent.yaml": "broken"}, "immutable": True})

    def refuse(method: str, kind: str, name: str) -> None:
        present = api.find(kind, name)
        if method == "PATCH" and present is not None and present.get("immutable"):
            raise Refusal(422, "field is immutable when `immutable` is set")

    api.on_write = refuse
    operating.reconcile(KEY)

    now = api.find("ConfigMap", "chat-agent")
    assert now is not None
    assert (now["data"], now.get("immutable")) == (live["data"], None)
    assert condition(api, reasons.SPEC_ACCEPTED)["status"] == "True"
