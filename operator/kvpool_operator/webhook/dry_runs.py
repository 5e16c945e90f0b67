"""A user's pod as it is put before the API server in a dry run. Pure.

Invariant: the pod is the one that would be made, but for what only the API server or the pod's controller may set, and for
the label by which the webhook is called: a dry run never leads to another review.
"""

from __future__ import annotations

from kvpool_operator.webhook.contract import INJECT_LABEL, Manifest

MOST_OF_GENERATED = 58
"""Characters of `generateName` that the API server keeps before its five random ones."""
SUFFIX = "trial"
"""In place of the random ones, which have no vowels: so no pod has the name, and two refusals of one pod read the same."""

_SERVER_SET = frozenset({"uid", "resourceVersion", "creationTimestamp", "managedFields", "selfLink", "generation"})


def build_trial(pod: Manifest, namespace: str) -> Manifest:
    """A copy to be tried in the namespace; `pod` is not changed."""
    metadata = pod.get("metadata") or {}
    labels = metadata.get("labels") or {}
    kept: Manifest = {name: value for name, value in metadata.items() if name not in _SERVER_SET}
    trial: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **kept,
            "name": metadata.get("name") or f"{metadata.get('generateName', '')[:MOST_OF_GENERATED]}{SUFFIX}",
            "namespace": namespace,
            "labels": {name: value for name, value in labels.items() if name != INJECT_LABEL},
        },
        "spec": pod.get("spec"),
    }
    if metadata.get("ownerReferences"):
        trial["metadata"]["ownerReferences"] = [_unblocking(owner) for owner in metadata["ownerReferences"]]
    return trial


def _unblocking(owner: Manifest) -> Manifest:
    """Admission may ask whoever sets `blockOwnerDeletion` for rights on the owner (OwnerReferencesPermissionEnforcement)."""
    return {name: value for name, value in owner.items() if name != "blockOwnerDeletion"}
