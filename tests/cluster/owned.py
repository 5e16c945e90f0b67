"""The objects that the operator made for a pool."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.cluster import Cluster

KINDS = (
    "daemonsets,deployments,statefulsets,services,configmaps,secrets,serviceaccounts,"
    "roles,rolebindings,poddisruptionbudgets,jobs"
)
CLUSTER_KINDS = "clusterrolebindings"
COUNTERS = ("deployment.kubernetes.io/", "deprecated.daemonset.template.")
"""Annotations by which Kubernetes numbers changes."""


def owned(cluster: Cluster, name: str, namespace: str) -> dict[str, Any]:
    """kind/name -> object, of a pool's namespace and of the cluster."""
    selector = f"--selector=kvpool.io/pool={name},kvpool.io/pool-namespace={namespace}"
    found = cluster.get(KINDS, f"--namespace={namespace}", selector)["items"]
    found += cluster.get(CLUSTER_KINDS, selector)["items"]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def essence(found: dict[str, Any]) -> dict[str, str]:
    """What of each object does not change by itself, to compare before and after."""
    return {key: json.dumps(_essence(each), sort_keys=True) for key, each in found.items()}


def _essence(each: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in each.items() if key not in ("metadata", "status")}
    metadata = each["metadata"]
    annotations = {k: v for k, v in metadata.get("annotations", {}).items() if not k.startswith(COUNTERS)}
    return {**kept, "labels": metadata.get("labels", {}), "annotations": annotations}
