"""From the API server's objects to what `observed` holds.

Invariant: whatever optional part an object lacks, a projection comes out; nothing here raises for a well-formed object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvpool_operator import names
from kvpool_operator.observed import Container, Namespace, Node, Owner, Pod, Taint, WarningEvent, Workload

Raw = Mapping[str, Any]

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)([kKMGTPEm]i?)?")
_FACTORS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    **{f"{unit}i": float(1 << (10 * (power + 1))) for power, unit in enumerate("KMGTPE")},
}


def amount(text: object) -> float:
    """A Kubernetes quantity as a number; 0 when it is none."""
    match = _AMOUNT.fullmatch(str(text))
    return float(match[1]) * _FACTORS.get(match[2] or "", 0.0) if match else 0.0


def namespace(raw: Raw) -> Namespace:
    """A Namespace."""
    meta = raw["metadata"]
    terminating = bool(meta.get("deletionTimestamp")) or (raw.get("status") or {}).get("phase") == "Terminating"
    return Namespace(name=meta["name"], labels=meta.get("labels") or {}, is_terminating=terminating)


def node(raw: Raw) -> Node:
    """A Node."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    allocatable = status.get("allocatable") or {}
    return Node(
        name=meta["name"],
        labels=meta.get("labels") or {},
        is_ready=_condition(status, "Ready").get("status") == "True",
        is_unschedulable=bool(spec.get("unschedulable")),
        memory_bytes=int(amount(allocatable.get("memory", 0))),
        taints=tuple(
            Taint(key=one["key"], value=one.get("value", ""), effect=one.get("effect", ""))
            for one in spec.get("taints") or ()
        ),
        allocatable=frozenset(name for name, value in allocatable.items() if amount(value) > 0),
    )


def pod(raw: Raw) -> Pod:
    """A Pod."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    scheduled = _condition(status, "PodScheduled")
    states = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        node=spec.get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        ip=status.get("podIP") or "",
        is_ready=_condition(status, "Ready").get("status") == "True",
        is_terminating=bool(meta.get("deletionTimestamp")),
        unscheduled=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        target_node=_target_node(spec),
        created_at=meta.get("creationTimestamp") or "",
        owner=_owner(meta),
        labels=meta.get("labels") or {},
        annotations={
            key: value for key, value in (meta.get("annotations") or {}).items() if key.startswith("kvpool.io/")
        },
        containers=tuple(_container(state) for state in states),
        images=frozenset(one.get("image", "") for one in spec.get("containers") or ()),
    )


def _owner(meta: Raw) -> Owner:
    found: Raw = next((one for one in meta.get("ownerReferences") or () if one.get("controller")), {})
    return Owner(kind=found.get("kind", ""), name=found.get("name", ""), uid=found.get("uid", ""))


def _target_node(spec: Raw) -> str:
    """A DaemonSet's pod names its node in an affinity to a field."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for field in term.get("matchFields") or ():
            if field.get("key") == "metadata.name" and field.get("values"):
                return str(field["values"][0])
    return ""


def _container(raw: Raw) -> Container:
    state = raw.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (raw.get("lastState") or {}).get("terminated") or {}
    has_ended = bool(ended) and ended.get("reason") != "ContainerStatusUnknown"
    return Container(
        name=raw.get("name", ""),
        image=raw.get("image", ""),
        is_ready=bool(raw.get("ready")),
        has_run=state.get("running") is not None or has_ended,
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        restarts=int(raw.get("restartCount") or 0),
        exit_code=int(ended.get("exitCode") or 0),
        exit_reason=ended.get("reason") or "",
        exit_message=ended.get("message") or "",
        finished_at=ended.get("finishedAt") or "",
    )


def workload(raw: Raw) -> Workload:
    """A DaemonSet, Deployment or StatefulSet."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    kind = raw["kind"]
    is_daemon_set = kind == "DaemonSet"
    daemon = ("desiredNumberScheduled", "currentNumberScheduled", "numberReady", "updatedNumberScheduled")
    counts = daemon if is_daemon_set else ("", "replicas", "readyReplicas", "updatedReplicas")
    desired, existing, ready, updated = (int(status.get(name) or 0) for name in counts)
    return Workload(
        kind=kind,
        name=meta["name"],
        uid=meta["uid"],
        desired=desired if is_daemon_set else int(spec.get("replicas", 1)),
        existing=existing,
        ready=ready,
        updated=updated,
        is_current=int(status.get("observedGeneration") or 0) >= int(meta.get("generation") or 0),
        config_hash=_template_annotations(spec).get(names.CONFIG_HASH, ""),
        failure=_condition(status, "ReplicaFailure").get("message", ""),
    )


def warning(raw: Raw) -> WarningEvent:
    """A Warning Event of the core API."""
    series = raw.get("series") or {}
    seen = raw.get("lastTimestamp") or series.get("lastObservedTime") or raw.get("eventTime") or ""
    about = raw.get("involvedObject") or {}
    return WarningEvent(
        object_uid=about.get("uid", ""),
        object_kind=about.get("kind", ""),
        object_name=about.get("name", ""),
        reason=raw.get("reason") or "",
        message=raw.get("message") or "",
        last_seen=seen or (raw["metadata"].get("creationTimestamp") or ""),
    )


def _template_annotations(spec: Raw) -> Raw:
    found: Raw = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    return found


def _condition(status: Raw, kind: str) -> Raw:
    found: Raw = next((one for one in status.get("conditions") or () if one.get("type") == kind), {})
    return found
