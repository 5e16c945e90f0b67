"""What others set beside us in a workload is claimed, so that the next apply removes it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.foreign_fields import claimed_fields
from tests.unit.fake_api_server import FakeApiServer
from tests.unit.played_cluster import KEY, settled

RESTARTED: dict[str, Any] = {
    "f:template": {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}
}
OURS = {
    "manager": "kvpool-operator",
    "operation": "Apply",
    "fieldsV1": {"f:spec": {"f:replicas": {}, "f:template": {"f:spec": {"f:volumes": {}}}}},
}
SIDECAR: dict[str, Any] = {"f:template": {"f:spec": {"f:containers": {'k:{"name":"side"}': {"f:image": {}}}}}}
TREES: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.just({}),
    lambda below: st.dictionaries(st.sampled_from(["f:a", "f:template", "f:metadata"]), below),
    max_leaves=8,
)


def other(fields: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """What somebody else wrote."""
    return {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": fields, **parts}


def live(*entries: dict[str, Any], kind: str = "Deployment") -> dict[str, Any]:
    """An object with these writers."""
    return {"kind": kind, "metadata": {"managedFields": list(entries)}}


def test_what_others_set_in_the_spec_becomes_ours() -> None:
    claimed = claimed_fields(live(OURS, other({"f:spec": SIDECAR, "f:metadata": {"f:labels": {}}})))

    assert claimed is not None
    spec = claimed[0]["fieldsV1"]["f:spec"]
    assert spec["f:template"]["f:spec"] == {**SIDECAR["f:template"]["f:spec"], "f:volumes": {}}
    assert claimed[1:] == [other({"f:metadata": {"f:labels": {}}})]


def test_restart_by_kubectl_stays_and_so_do_status_and_subresources() -> None:
    status = other({"f:status": {"f:replicas": {}}}, manager="kube-controller-manager", subresource="status")
    scale = other({"f:spec": {"f:replicas": {}}}, subresource="scale")
    restarted = other({"f:spec": RESTARTED})

    assert claimed_fields(live(OURS, status, scale, restarted)) is None
    claimed = claimed_fields(
        live(OURS, other({"f:spec": {**SIDECAR["f:template"], "f:template": RESTARTED["f:template"]}}))
    )
    assert claimed is not None
    assert claimed[1]["fieldsV1"] == {"f:spec": RESTARTED}


def test_settings_of_a_service_and_objects_that_we_never_applied_are_left() -> None:
    edited = other({"f:spec": {"f:loadBalancerSourceRanges": {}}})

    assert claimed_fields(live(OURS, edited, kind="Service")) is None
    assert claimed_fields(live(edited)) is None
    assert claimed_fields({"kind": "Deployment", "metadata": {}}) is None


@given(st.lists(TREES, max_size=4))
def test_claimed_once_nothing_is_left_to_claim_and_nothing_of_ours_is_lost(trees: list[dict[str, Any]]) -> None:
    claimed = claimed_fields(live(OURS, *(other({"f:spec": tree}) for tree in trees)))

    if claimed is not None:
        assert claimed_fields(live(*claimed)) is None
        spec = claimed[0]["fieldsV1"]["f:spec"]
        assert "f:replicas" in spec
        assert "f:volumes" in spec["f:template"]["f:spec"]


def test_edit_is_claimed_before_the_workload_is_put_back(api: FakeApiServer) -> None:
    operating = settled(api)
    deployment = api.find("Deployment", "chat-router")
    assert deployment is not None
    entries = [OURS, other({"f:spec": SIDECAR})]
    spec = {**deployment["spec"], "minReadySeconds": 9}
    api.put({**deployment, "spec": spec, "metadata": {**deployment["metadata"], "managedFields": entries}})

    operating.reconcile(KEY)

    now = api.find("Deployment", "chat-router")
    assert now is not None
    assert [one["manager"] for one in now["metadata"]["managedFields"]] == ["kvpool-operator"]
    assert now["spec"]["minReadySeconds"] == 0
