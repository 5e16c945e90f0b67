"""Reads what a pool's status and plan are made from.

Invariant: reads only; one request per kind and reconcile, those for Events only when something is amiss.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpool_operator import names, projections
from kvpool_operator.kube import Kube
from kvpool_operator.observed import Namespace, Node, Pod, WarningEvent
from kvpool_operator.ownership import Claim, claim, is_of_workload
from kvpool_operator.plan.rbac import EVERYWHERE
from kvpool_operator.pool import Pool

ENDED = frozenset({"Succeeded", "Failed"})
NAMESPACES_ASKED_ONE_BY_ONE = 8
"""Above that, one request for the whole cluster is cheaper."""


def read_namespaces(kube: Kube, pool: Pool) -> tuple[Namespace, ...]:
    """All of them where the pool chooses by label, else only its own."""
    if pool.allowed_namespaces.kind == "Selector":
        return tuple(projections.namespace(raw) for raw in kube.list_all("Namespace"))
    raw = kube.get("Namespace", None, pool.namespace)
    return () if raw is None else (projections.namespace(raw),)


def is_terminating(namespaces: tuple[Namespace, ...], name: str) -> bool:
    """Whether a namespace is being deleted or gone."""
    found = next((one for one in namespaces if one.name == name), None)
    return found is None or found.is_terminating


def read_nodes(kube: Kube, pool: Pool) -> tuple[Node, ...]:
    """Nodes that the pool's nodeSelector matches."""
    labels = ",".join(f"{key}={value}" for key, value in pool.agent.node_selector)
    return tuple(projections.node(raw) for raw in kube.list_all("Node", labels=labels))


def read_pods(kube: Kube, pool: Pool) -> tuple[Pod, ...]:
    """The pool's own pods, also those whose workload is gone already."""
    labels = f"{names.POOL_UID_LABEL}={pool.uid}"
    pods = (projections.pod(raw) for raw in kube.list_all("Pod", namespace=pool.namespace, labels=labels))
    return tuple(pod for pod in pods if is_of_workload(pod, pool))


def read_members(kube: Kube, pool: Pool) -> tuple[Pod, ...]:
    """The pool's own pods that may be sent a token or a password: agents and Valkey's only of the workloads that are there."""
    uids = {names.AGENT: _uid(kube, pool, "DaemonSet", names.agent_name(pool))}
    if pool.managed is not None:
        uids[names.VALKEY] = _uid(kube, pool, "StatefulSet", names.valkey_name(pool))
    return tuple(pod for pod in read_pods(kube, pool) if uids.get(pod.component, pod.owner.uid) == pod.owner.uid)


def _uid(kube: Kube, pool: Pool, kind: str, name: str) -> str | None:
    raw = kube.get(kind, pool.namespace, name)
    if raw is None or claim(raw["metadata"], pool) not in (Claim.OURS, Claim.GOING):
        return None
    return str(raw["metadata"]["uid"])


def read_engines(kube: Kube, pool: Pool, allowed: tuple[str, ...]) -> tuple[Pod, ...]:
    """Pods with the connector of this pool, where it may be used: their labels alone could be anybody's."""
    labels = f"{names.ROLE_LABEL}=engine,{names.POOL_LABEL}={pool.name},{names.POOL_NAMESPACE_LABEL}={pool.namespace}"
    return tuple(_living(kube, allowed, labels))


def read_candidates(kube: Kube, pool: Pool, allowed: tuple[str, ...]) -> tuple[Pod, ...]:
    """Pods that name this pool and have no connector."""
    labels = f"{names.INJECT_LABEL}=true,{names.ROLE_LABEL}!=engine"
    return tuple(pod for pod in _living(kube, allowed, labels) if opted_into(pod) == pool.key)


def _living(kube: Kube, allowed: tuple[str, ...], labels: str) -> Iterator[Pod]:
    """Pods in the allowed namespaces that have not ended."""
    is_few = allowed != EVERYWHERE and len(allowed) <= NAMESPACES_ASKED_ONE_BY_ONE
    for namespace in allowed if is_few else (None,):
        for raw in kube.list_all("Pod", namespace=namespace, labels=labels):
            pod = projections.pod(raw)
            if pod.phase not in ENDED and (allowed == EVERYWHERE or pod.namespace in allowed):
                yield pod


def opted_into(pod: Pod) -> tuple[str, str] | None:
    """(namespace, name) of the pool that a pod names; None when it names none."""
    text = pod.annotations.get(names.POOL_ANNOTATION, "").strip()
    if not text:
        return None
    namespace, slash, name = text.partition("/")
    return (namespace, name) if slash else (pod.namespace, text)


def read_warnings(kube: Kube, pool: Pool) -> tuple[WarningEvent, ...]:
    """Warning Events of the pool's namespace: why pods were not made or wait."""
    raws = kube.list_all("Event", namespace=pool.namespace, fields="type=Warning")
    return tuple(projections.warning(raw) for raw in raws)
