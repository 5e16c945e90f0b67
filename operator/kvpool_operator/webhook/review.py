"""One AdmissionReview (admission.k8s.io/v1): request in, response with a JSON Patch out.

Invariant: every answer allows the pod. What cannot be understood is allowed with a warning.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass

from kvpool_operator.webhook.contract import INJECT_LABEL, Manifest
from kvpool_operator.webhook.inject import AlreadyInjected, Injection, Surroundings, decide, is_injected, stamp_skip
from kvpool_operator.webhook.json_patch import json_patch
from kvpool_operator.webhook.pool_reference import pool_reference
from kvpool_operator.webhook.skip_reasons import POLICY_REFUSES, Skip
from kvpool_operator.webhook.verdicts import VerdictCache
from kvpool_operator.webhook.views import NamespaceFacts, PoolView

API_VERSION = "admission.k8s.io/v1"
WARNING_LENGTH = 256
"""The API server cuts warnings at 256 bytes when there are many; the whole text is on the pod."""

UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
"""What reading a body that is no review may raise."""

FindPool = Callable[[str, str], PoolView | None]
FindNamespace = Callable[[str], NamespaceFacts | None]


@dataclass(frozen=True, slots=True)
class Review:
    """What came of a review: the answer's body, and for logs and metrics its outcome and reason."""

    body: bytes
    outcome: str
    """`injected`, `already`, `skipped`, `ignored` or `failed`."""
    reason: str = ""
    pod: str = ""


class PodReviewer:
    """Answers reviews from what the operator's caches know."""

    def __init__(self, *, find_pool: FindPool, find_namespace: FindNamespace, verdicts: VerdictCache) -> None:
        self._find_pool = find_pool
        self._find_namespace = find_namespace
        self._verdicts = verdicts

    def review(self, body: bytes) -> Review:
        """The answer to a request's body."""
        try:
            request = json.loads(body)["request"]
            uid, pod, namespace = request["uid"], request["object"], request["namespace"]
            kind, operation = request["kind"]["kind"], request["operation"]
        except UNREADABLE as error:
            return allow(request_uid(body), "failed", reason="NotAReview", warning=f"not an AdmissionReview: {error!r}")
        labels = (pod.get("metadata") or {}).get("labels") or {} if isinstance(pod, dict) else {}
        if kind != "Pod" or operation != "CREATE" or labels.get(INJECT_LABEL) != "true":
            return allow(uid, "ignored")
        return self._answer(uid, pod, namespace)

    def _answer(self, uid: str, pod: Manifest, namespace: str) -> Review:
        decision = self._decide(pod, namespace)
        name = pod["metadata"].get("name") or pod["metadata"].get("generateName", "")
        text = f"{namespace}/{name}"
        match decision:
            case Injection():
                return allow(uid, "injected", patch=json_patch(pod, decision.pod), pod=text)
            case AlreadyInjected():
                return allow(uid, "already", pod=text)
            case Skip():
                patch = json_patch(pod, stamp_skip(pod, decision))
                warning = f"the pod is not given the cache: {decision.text}"
                return allow(uid, "skipped", reason=decision.reason, patch=patch, warning=warning, pod=text)

    def _decide(self, pod: Manifest, namespace: str) -> Injection | Skip | AlreadyInjected:
        reference = pool_reference(pod, namespace)
        if isinstance(reference, Skip):
            return reference
        pool, facts = self._find_pool(*reference), self._find_namespace(namespace)
        around = Surroundings(namespace=namespace, reference=reference, pool=pool, facts=facts)
        decision = decide(pod, around)
        if not isinstance(decision, Injection) or is_injected(pod):
            return decision
        refusal = self._verdicts.refusal(namespace, pod, decision.pod)
        return (
            Skip(POLICY_REFUSES, f"namespace {namespace} refuses the pod as injected: {refusal}")
            if refusal
            else decision
        )


def request_uid(body: bytes) -> str:
    """The uid that an answer has to repeat, from whatever can be read; "" otherwise."""
    try:
        return str(json.loads(body)["request"]["uid"])
    except UNREADABLE:
        return ""


def allow(
    uid: str,
    outcome: str,
    *,
    reason: str = "",
    patch: list[Manifest] | None = None,
    warning: str = "",
    pod: str = "",
) -> Review:
    """An answer that lets the pod in."""
    response: Manifest = {"uid": uid, "allowed": True}
    if patch:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    if warning:
        response["warnings"] = [f"kvpool: {warning}"[:WARNING_LENGTH]]
    answer = {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
    return Review(json.dumps(answer).encode(), outcome, reason, pod)
