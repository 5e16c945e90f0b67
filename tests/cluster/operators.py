"""The operator's replicas as tests see them."""

from __future__ import annotations

from tests.cluster.cluster import Cluster
from tests.cluster.installation import SYSTEM

LEASE = "kvpool-operator"


def operators(cluster: Cluster) -> list[str]:
    """Names of the pods that run."""
    selector = "--selector=app.kubernetes.io/component=operator"
    found = cluster.get("pods", f"--namespace={SYSTEM}", selector)["items"]
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]


def leader(cluster: Cluster) -> str:
    """The pod that the Lease names."""
    return str(cluster.get("lease", LEASE, f"--namespace={SYSTEM}")["spec"]["holderIdentity"])


def operator_pid(cluster: Cluster, pod: str) -> int:
    """On this machine."""
    return cluster.container_pid(SYSTEM, pod, "operator")
