"""Names, labels and references of everything that the operator makes.

Invariant: two pools never get the same name for an object in the same place, and every object says whose it is.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from kvpool_operator.pool import Pool

Manifest = dict[str, Any]
"""An object as the API server takes it."""

GROUP: Final = "kvpool.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "KVCachePool"
PLURAL: Final = "kvcachepools"
FIELD_MANAGER: Final = "kvpool-operator"
FINALIZER: Final = "kvpool.io/purge"

POOL_LABEL: Final = "kvpool.io/pool"
POOL_NAMESPACE_LABEL: Final = "kvpool.io/pool-namespace"
POOL_UID_LABEL: Final = "kvpool.io/pool-uid"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
ROLE_LABEL: Final = "kvpool.io/role"
INJECT_LABEL: Final = "kvpool.io/inject"
CONFIG_HASH: Final = "kvpool.io/config-hash"
RECONCILE_ANNOTATION: Final = "kvpool.io/reconcile"
INJECTED_ANNOTATION: Final = "kvpool.io/injected"
SKIPPED_ANNOTATION: Final = "kvpool.io/skip-reason"
POOL_ANNOTATION: Final = "kvpool.io/pool"

AGENT: Final = "agent"
ROUTER: Final = "router"
VALKEY: Final = "valkey"
PURGE: Final = "purge"

RUN_AS: Final = 65532
"""User and group of every container but the one that owns the socket folder."""


def agent_name(pool: Pool) -> str:
    """DaemonSet, ServiceAccount and ConfigMap of the agents."""
    return f"{pool.name}-agent"


def router_name(pool: Pool) -> str:
    """Deployment, Service, ServiceAccount, ConfigMap, Role and PodDisruptionBudget of the router."""
    return f"{pool.name}-router"


def valkey_name(pool: Pool) -> str:
    """StatefulSet, Service, ConfigMap, Secret and PodDisruptionBudget of the managed Valkey."""
    return f"{pool.name}-valkey"


def token_name(pool: Pool) -> str:
    """Secret with the bearer token of the agents' and routers' admin API."""
    return f"{pool.name}-token"


def namespaces_name(pool: Pool) -> str:
    """ConfigMap with the names of the namespaces that may opt in."""
    return f"{pool.name}-namespaces"


def purge_name(pool: Pool) -> str:
    """Job that removes the pool's keys from an external Valkey."""
    return purge_name_of(pool.name)


def purge_name_of(pool: str) -> str:
    """The same from the pool's name."""
    return f"{pool}-purge"


def far_name(pool: Pool, component: str) -> str:
    """Name of an object outside the pool's namespace; ':' is in no namespace's name, so two pools never meet."""
    return far_name_of(pool.namespace, pool.name, component)


def far_name_of(namespace: str, pool: str, component: str) -> str:
    """The same from the pool's namespace and name."""
    return f"kvpool:{namespace}:{pool}:{component}"


def master_name(uid: str) -> str:
    """Secret in the operator's namespace with what was generated for a pool."""
    return f"kvpool-{uid}"


def key_prefix(pool: Pool) -> str:
    """Start of every key of the pool in Valkey."""
    external = pool.external
    return (external.key_prefix if external else "") or f"kvpool:{pool.namespace}/{pool.name}:"


def host_folder(pool: Pool) -> str:
    """Folder on the host where agent and engines meet."""
    return f"/var/run/kvpool/{pool.namespace}/{pool.name}"


def router_url(pool: Pool) -> str:
    """Where clients of the pool connect."""
    port = pool.routing.service.port
    return f"http://{router_name(pool)}.{pool.namespace}.svc" + ("" if port == 80 else f":{port}")


def selector(pool: Pool, component: str) -> dict[str, str]:
    """Labels by which workloads and Services select pods; immutable, so without the pool's uid."""
    return {
        "app.kubernetes.io/name": "kvpool",
        "app.kubernetes.io/instance": pool.name,
        COMPONENT_LABEL: component,
        POOL_LABEL: pool.name,
        POOL_NAMESPACE_LABEL: pool.namespace,
    }


def labels(pool: Pool, component: str) -> dict[str, str]:
    """Labels of every object and pod of a pool."""
    return {**selector(pool, component), MANAGED_BY_LABEL: FIELD_MANAGER, POOL_UID_LABEL: pool.uid}


def owner_reference(pool: Pool) -> Manifest:
    """The controller reference by which the garbage collector removes an object with its pool."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": pool.name,
        "uid": pool.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata(pool: Pool, name: str, component: str) -> Manifest:
    """Metadata of an object in the pool's namespace."""
    return {
        "name": name,
        "namespace": pool.namespace,
        "labels": labels(pool, component),
        "ownerReferences": [owner_reference(pool)],
    }


def far_metadata(pool: Pool, component: str, *, namespace: str | None) -> Manifest:
    """Metadata of an object elsewhere; `namespace` None: cluster-scoped. It can have no owner, its labels say whose it is."""
    place = {} if namespace is None else {"namespace": namespace}
    return {"name": far_name(pool, component), **place, "labels": labels(pool, component)}


def reference(pool: Pool) -> Manifest:
    """What an Event about a pool refers to."""
    return reference_of({"namespace": pool.namespace, "name": pool.name, "uid": pool.uid})


def reference_of(meta: Manifest) -> Manifest:
    """The same from a pool's metadata."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": meta["namespace"],
        "name": meta["name"],
        "uid": meta["uid"],
    }


def digest(value: object) -> str:
    """Short hash of a JSON value, equal for equal values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
