"""On which nodes a pod may land, as far as its own spec decides. Pure.

Invariant: a node on which the scheduler could place the pod is never left out; one that it could not may be let in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.views import NodeView, Taint

_ORDINARY = frozenset({"cpu", "memory", "ephemeral-storage"})
_CORDON = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
_PASSING = frozenset(
    f"node.kubernetes.io/{condition}"
    for condition in (
        "not-ready",
        "unreachable",
        "memory-pressure",
        "disk-pressure",
        "pid-pressure",
        "network-unavailable",
    )
)
"""Taints that come and go with the node's condition: a pod that waits lands there later."""


def may_land(pod: Manifest, node: NodeView) -> bool:
    """Whether nothing in the pod's spec keeps it off the node, now or once the node is well again."""
    return _matches(pod, node) and all(taint.key in _PASSING or _accepts(pod, taint) for taint in _taints(node))


def may_land_now(pod: Manifest, node: NodeView) -> bool:
    """Whether nothing keeps it off the node as that is now."""
    return _matches(pod, node) and all(_accepts(pod, taint) for taint in _taints(node))


def _matches(pod: Manifest, node: NodeView) -> bool:
    spec = pod.get("spec", {})
    if spec.get("nodeName"):
        return bool(spec["nodeName"] == node.name)
    return (
        all(node.labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())
        and _affinity_allows(spec, node)
        and _devices(spec) <= node.allocatable
    )


def _taints(node: NodeView) -> Iterable[Taint]:
    return (*node.taints, _CORDON) if node.unschedulable else node.taints


def _accepts(pod: Manifest, taint: Taint) -> bool:
    """A pod that names its node does not ask the scheduler, which is who looks at taints."""
    spec = pod.get("spec", {})
    return bool(spec.get("nodeName")) or _is_tolerated(taint, spec.get("tolerations") or [])


def _devices(spec: Manifest) -> set[str]:
    """Extended resources that the pod cannot do without."""
    return {
        name
        for container in spec.get("containers") or []
        for name, amount in ((container.get("resources") or {}).get("limits") or {}).items()
        if name not in _ORDINARY and not name.startswith("hugepages-") and str(amount) != "0"
    }


def _affinity_allows(spec: Manifest, node: NodeView) -> bool:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    return terms is None or any(_term_matches(term, node) for term in terms)


def _term_matches(term: Manifest, node: NodeView) -> bool:
    labels, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not labels and not fields:
        return False  # an empty term selects nothing
    own_fields = {"metadata.name": node.name}
    return all(_holds(each, node.labels) for each in labels) and all(_holds(each, own_fields) for each in fields)


def _holds(requirement: Manifest, values: Mapping[str, str]) -> bool:
    key, operator = requirement.get("key", ""), requirement.get("operator", "")
    wanted: list[str] = requirement.get("values") or []
    has, value = key in values, values.get(key, "")
    match operator:
        case "In":
            return has and value in wanted
        case "NotIn":
            return not has or value not in wanted
        case "Exists":
            return has
        case "DoesNotExist":
            return not has
    return has  # Gt and Lt: let in


def _is_tolerated(taint: Taint, tolerations: Iterable[Manifest]) -> bool:
    return taint.effect == "PreferNoSchedule" or any(_tolerates(each, taint) for each in tolerations)


def _tolerates(toleration: Manifest, taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    key, operator = toleration.get("key", ""), toleration.get("operator") or "Equal"
    if operator == "Exists":
        return key in ("", taint.key)
    if operator != "Equal":
        return bool(key == taint.key)  # comparisons of numbers: let in
    return bool(key == taint.key and (toleration.get("value") or "") == taint.value)
