"""The objects that the operator made for a pool, and whatever else says that it belongs to it."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.cluster import Cluster

KINDS = (
    "daemonsets,deployments,statefulsets,services,configmaps,secrets,serviceaccounts,"
    "roles,rolebindings,clusterrolebindings,poddisruptionbudgets,jobs,networkpolicies,leases"
)
COUNTERS = ("deployment.kubernetes.io/", "deprecated.daemonset.template.")
"""Annotations by which Kubernetes numbers changes."""
TOLD = frozenset({"events", "events.events.k8s.io"})
"""They outlive what they are about."""


def owned(cluster: Cluster, name: str, namespace: str) -> dict[str, Any]:
    """kind/namespace/name -> object, wherever it lies."""
    selector = f"--selector=kvpool.io/pool={name},kvpool.io/pool-namespace={namespace},kvpool.io/pool-uid"
    found = cluster.get(KINDS, "--all-namespaces", selector)["items"]
    return {f"{each['kind']}/{_place(each)}{each['metadata']['name']}": each for each in found}


def traces(cluster: Cluster, uid: str) -> list[str]:
    """Every object of any kind that names a pool's uid as its label or its owner."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--output=name").split()
    found = cluster.get(",".join(kind for kind in kinds if kind not in TOLD), "--all-namespaces")["items"]
    return sorted(f"{each['kind']}/{_place(each)}{each['metadata']['name']}" for each in found if _names(each, uid))


def _names(each: Any, uid: str) -> bool:
    metadata = each["metadata"]
    owners = {owner["uid"] for owner in metadata.get("ownerReferences", [])}
    return uid in owners or uid in metadata.get("labels", {}).values()


def _place(each: Any) -> str:
    return f"{each['metadata']['namespace']}/" if "namespace" in each["metadata"] else ""


def essence(found: dict[str, Any]) -> dict[str, str]:
    """What of each object does not change by itself, to compare before and after."""
    return {key: json.dumps(_essence(each), sort_keys=True) for key, each in found.items()}


def _essence(each: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in each.items() if key not in ("metadata", "status")}
    metadata = each["metadata"]
    annotations = {k: v for k, v in metadata.get("annotations", {}).items() if not k.startswith(COUNTERS)}
    return {**kept, "labels": metadata.get("labels", {}), "annotations": annotations}
