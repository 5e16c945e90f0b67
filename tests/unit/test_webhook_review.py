"""Every review is answered with "allowed"; the patch makes the pod what was decided."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.review import PodReviewer, Review
from kvpool_operator.webhook.verdicts import VerdictCache
from kvpool_operator.webhook.views import NamespaceFacts, PoolView
from tests.unit.webhook_pods import POOL, apply_patch, engine_pod, injected, outcome, recorded


def admit(pod: Manifest) -> str:
    """An API server without policies."""
    return ""


def reviewer(dry_run: Any = admit, pool: PoolView | None = POOL) -> PodReviewer:
    """A reviewer that knows one pool, in `default`."""
    return PodReviewer(
        find_pool=lambda namespace, name: pool if (namespace, name) == ("default", "chat") else None,
        find_namespace=lambda name: NamespaceFacts(name) if name != "unknown" else None,
        verdicts=VerdictCache(dry_run),
    )


def request_body(pod: object, **changes: Any) -> bytes:
    """An AdmissionReview as the API server sends it."""
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": "default",
        "operation": "CREATE",
        "object": pod,
        "dryRun": False,
        **changes,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def response_of(review: Review) -> Manifest:
    """The response, which must let the pod in."""
    answer = json.loads(review.body)
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: Manifest = answer["response"]
    assert response["allowed"] is True
    return response


def patched(pod: Manifest, response: Manifest) -> Manifest:
    """The pod as the API server makes it of the response."""
    assert response["patchType"] == "JSONPatch"
    result: Manifest = apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
    return result


def test_an_engine_is_injected() -> None:
    pod = recorded("inferenceservice-vllm-first-call.pod.json")
    review = reviewer().review(request_body(pod))
    response = response_of(review)
    assert review.outcome == "injected"
    assert response["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    assert "warnings" not in response
    assert patched(pod, response) == outcome(pod)


def test_a_skipped_pod_carries_the_reason_and_its_maker_is_warned() -> None:
    pod = engine_pod("--kv-transfer-config", "{}")
    review = reviewer().review(request_body(pod))
    response = response_of(review)
    assert (review.outcome, review.reason) == ("skipped", "OwnKvTransfer")
    assert patched(pod, response)["metadata"]["annotations"]["kvpool.io/skip-reason"].startswith("OwnKvTransfer: ")
    assert len(response["warnings"]) == 1
    assert "OwnKvTransfer" in response["warnings"][0]


def test_a_repeated_call_changes_nothing() -> None:
    review = reviewer().review(request_body(injected(engine_pod())))
    assert review.outcome == "already"
    assert "patch" not in response_of(review)
    skipped = outcome(engine_pod("--headless"))
    assert "patch" not in response_of(reviewer().review(request_body(skipped)))


def test_the_pools_namespace_is_the_pods_where_it_is_not_named() -> None:
    review = reviewer().review(request_body(engine_pod(), namespace="other"))
    assert review.reason == "PoolNotFound"
    pod = engine_pod()
    pod["metadata"]["annotations"]["kvpool.io/pool"] = "default/chat"
    assert reviewer().review(request_body(pod, namespace="other")).outcome == "injected"
    assert reviewer().review(request_body(pod, namespace="unknown")).reason == "NamespaceUnknown"


def refuse_host_paths(pod: Manifest) -> str:
    """A policy."""
    return "no hostPath here" if any("hostPath" in volume for volume in pod["spec"].get("volumes") or []) else ""


def test_a_pod_that_a_policy_refuses_as_injected_is_let_in_as_it_came() -> None:
    pod = recorded("inferenceservice-vllm-first-call.pod.json")
    review = reviewer(refuse_host_paths).review(request_body(pod))
    assert review.reason == "PolicyRefuses"
    response = response_of(review)
    assert "no hostPath here" in response["warnings"][0]
    found = patched(pod, response)
    assert found["spec"] == pod["spec"]
    assert "no hostPath here" in found["metadata"]["annotations"]["kvpool.io/skip-reason"]


def test_the_users_own_pod_is_tried_so_that_no_other_policy_hides_the_one_that_counts() -> None:
    """A sample of ours would be refused for what it lacks, with or without the hostPath."""

    def refuse_more(pod: Manifest) -> str:
        return refuse_host_paths(pod) if pod["metadata"]["labels"].get("team") else "every pod needs a label team"

    pod = engine_pod()
    pod["metadata"]["labels"]["team"] = "a"
    assert reviewer(refuse_more).review(request_body(pod)).reason == "PolicyRefuses"
    del pod["metadata"]["labels"]["team"]
    assert reviewer(refuse_more).review(request_body(pod)).outcome == "injected"


def test_only_pods_that_would_be_injected_are_tried() -> None:
    tried: list[Manifest] = []

    def note(pod: Manifest) -> str:
        tried.append(pod)
        return ""

    asked = reviewer(note)
    asked.review(request_body(engine_pod("--headless")))
    asked.review(request_body(injected(engine_pod())))
    assert tried == []
    asked.review(request_body(engine_pod()))
    assert [pod["metadata"]["annotations"]["kvpool.io/injected"] for pod in tried] == ["default/chat"]


@pytest.mark.parametrize(
    "changes",
    [
        {"operation": "UPDATE"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"object": {"metadata": {"labels": {"kvpool.io/inject": "false"}}}},
        {"object": {"metadata": {}}},
        {"object": None},
    ],
)
def test_what_did_not_opt_in_is_ignored(changes: Manifest) -> None:
    review = reviewer().review(request_body(engine_pod(), **changes))
    assert review.outcome == "ignored"
    assert "patch" not in response_of(review)


@given(
    body=st.binary(max_size=60) | st.sampled_from([b"", b"null", b"[]", b"{}", b'{"request":{}}', b'{"request":null}'])
)
def test_garbage_is_let_in_with_a_warning(body: bytes) -> None:
    review = reviewer().review(body)
    assert review.outcome == "failed"
    assert "not an AdmissionReview" in response_of(review)["warnings"][0]


def test_the_uid_is_repeated_as_far_as_it_can_be_read() -> None:
    assert response_of(reviewer().review(b'{"request":{"uid":"u"}}'))["uid"] == "u"
