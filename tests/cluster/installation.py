"""The three moves of a user: `helm install`, `kubectl apply` a pool, label the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_for
from tests.cluster.workloads import Manifest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvpool"
RELEASE = "kvpool"
SYSTEM = "kvpool-system"
READY_SECONDS = 120.0


def image_values(reference: str, prefix: str) -> list[str]:
    """`registry/repository:tag` as values of the chart below `prefix`."""
    name, _, tag = reference.rpartition(":")
    registry, _, repository = name.partition("/")
    values = {"registry": registry, "repository": repository, "tag": tag}
    return [f"--set-string={prefix}.{key}={value}" for key, value in values.items()]


def helm_install(cluster: Cluster, *values: str, image: str = "") -> None:
    """Install or upgrade the operator of this checkout; ends when it serves."""
    images = image_values(image or cluster.image("kvpool"), "image") + image_values(
        cluster.image("valkey"), "valkey.image"
    )
    cluster.helm(
        "upgrade", "--install", RELEASE, str(CHART), f"--namespace={SYSTEM}", "--create-namespace",
        "--wait", "--timeout=120s", *images, *values,
    )  # fmt: skip


def helm_uninstall(cluster: Cluster) -> None:
    """As a user would; a release that is not there is fine."""
    cluster.helm("uninstall", RELEASE, f"--namespace={SYSTEM}", "--ignore-not-found", "--wait", "--timeout=120s")


def pool_manifest(
    name: str, namespace: str, *, capacity: str = "1Gi", node_selector: dict[str, str] | None = None, **spec: Any
) -> Manifest:
    """A pool on all Linux nodes; `spec` is merged over it."""
    return {
        "apiVersion": "kvpool.io/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "agent": {"nodeSelector": node_selector or {"kubernetes.io/os": "linux"}},
            "ram": {"capacityPerNode": capacity},
            **spec,
        },
    }


def read_pool(cluster: Cluster, name: str, namespace: str) -> Any:
    """The object as the API server has it."""
    return cluster.get("kvcachepool", name, f"--namespace={namespace}")


def condition(pool: Any, kind: str) -> dict[str, Any]:
    """One condition of a pool; {} while it is not there. Only what was observed of the newest spec counts."""
    for found in pool.get("status", {}).get("conditions", []):
        if found["type"] == kind and found.get("observedGeneration") == pool["metadata"]["generation"]:
            return dict(found)
    return {}


def is_ready(pool: Any) -> bool:
    """Whether the pool says so."""
    return condition(pool, "Ready").get("status") == "True"


def wait_pool_ready(cluster: Cluster, name: str, namespace: str, *, seconds: float = READY_SECONDS) -> Any:
    """The pool, once it is Ready; the error quotes its conditions."""

    def ready() -> Any:
        pool = read_pool(cluster, name, namespace)
        return pool if is_ready(pool) else None

    def conditions() -> str:
        found = read_pool(cluster, name, namespace).get("status", {}).get("conditions", [])
        return "; ".join(f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in found)

    return wait_for(ready, seconds=seconds, what=f"pool {namespace}/{name} Ready", explain=conditions)


def ensure_namespace(cluster: Cluster, name: str, labels: dict[str, str] | None = None) -> None:
    """Make it if it is not there."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}})


def delete_namespace(cluster: Cluster, name: str, *, seconds: float = 90.0) -> None:
    """Delete it with all it holds; ends when it is gone."""
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", f"--timeout={seconds:g}s", seconds=seconds + 10)
