"""Removes what dead pools left where the garbage collector does not go.

Invariant: an object goes only when it says which pool it belongs to by uid, has the name that we would give it (a copy has
not), and that uid was not among the pools *after* the object was seen; and only exactly that object goes.
"""

from __future__ import annotations

import logging

from kvpool_operator import names
from kvpool_operator.kube import Kube, Raw
from kvpool_operator.kube_errors import NotFoundError

log = logging.getLogger("kvpool.operator.garbage")


def collect(kube: Kube, *, operator_namespace: str) -> int:
    """Remove bindings, purge Jobs and master Secrets of pools that are no more; how many."""
    found = [raw for raw in _far_objects(kube, operator_namespace) if _uid(raw) and _is_named_by_us(raw)]
    try:
        living = {raw["metadata"]["uid"] for raw in kube.list_all(names.KIND)}
    except NotFoundError:
        return 0  # the CRD is missing: nobody can tell which pools there are
    dead = [raw for raw in found if _uid(raw) not in living]
    for raw in dead:
        meta = raw["metadata"]
        log.info("removing what a dead pool left", extra={"data": {"kind": raw["kind"], "name": meta["name"]}})
        kube.delete(raw["kind"], meta.get("namespace"), meta["name"], uid=meta["uid"])
    return len(dead)


def _far_objects(kube: Kube, operator_namespace: str) -> list[Raw]:
    labels = f"{names.MANAGED_BY_LABEL}={names.FIELD_MANAGER},{names.POOL_UID_LABEL}"
    found = [raw for kind in ("ClusterRoleBinding", "RoleBinding") for raw in kube.list_all(kind, labels=labels)]
    found += kube.list_all("Job", labels=f"{labels},{names.COMPONENT_LABEL}={names.PURGE}")
    found += kube.list_all("Secret", namespace=operator_namespace, labels=labels)
    return [raw for raw in found if not raw["metadata"].get("deletionTimestamp") and not _has_owner(raw)]


def _has_owner(raw: Raw) -> bool:
    return bool(raw["metadata"].get("ownerReferences"))


def _is_named_by_us(raw: Raw) -> bool:
    labels = raw["metadata"]["labels"]
    namespace, pool = labels.get(names.POOL_NAMESPACE_LABEL, ""), labels.get(names.POOL_LABEL, "")
    wanted = {
        "Job": names.purge_name_of(pool),
        "Secret": names.master_name(_uid(raw)),
    }.get(raw["kind"], names.far_name_of(namespace, pool, labels.get(names.COMPONENT_LABEL, "")))
    return bool(raw["metadata"]["name"] == wanted)


def _uid(raw: Raw) -> str:
    return str((raw["metadata"].get("labels") or {}).get(names.POOL_UID_LABEL, ""))
