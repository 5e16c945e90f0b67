"""Removes what dead pools left where the garbage collector does not go.

Invariant: an object goes only when it says which pool it belongs to by uid, has the name that we would give it (a copy has
not), and that uid was not among the pools *after* the object was seen; and only exactly that object goes.
"""

from __future__ import annotations

import logging

from kvpool_operator import names
from kvpool_operator.kube import Kube, Raw
from kvpool_operator.kube_errors import REFUSALS, ConflictError, ForbiddenError, NotFoundError

log = logging.getLogger("kvpool.operator.garbage")


class Collector:
    """Of one term of leading. What the API server refuses is said once, keeps nothing else, and is tried again by every resync."""

    def __init__(self, kube: Kube, *, operator_namespace: str) -> None:
        self._kube = kube
        self._operator_namespace = operator_namespace
        self._said: set[str] = set()

    def collect(self) -> int:
        """Remove bindings, purge Jobs and master Secrets of pools that are no more; how many."""
        found = [raw for raw in self._far_objects() if _uid(raw) and _is_named_by_us(raw)]
        try:
            living = {raw["metadata"]["uid"] for raw in self._kube.list_all(names.KIND)}
        except NotFoundError:
            return 0  # the CRD is missing: nobody can tell which pools there are
        return sum(self._remove(raw) for raw in found if _uid(raw) not in living)

    def _remove(self, raw: Raw) -> bool:
        meta = raw["metadata"]
        what = {"kind": raw["kind"], "namespace": meta.get("namespace"), "name": meta["name"]}
        try:
            self._kube.delete(raw["kind"], meta.get("namespace"), meta["name"], uid=meta["uid"])
        except (ConflictError, *REFUSALS) as error:
            self._say(f"cannot remove what a dead pool left: allow it, or remove it by hand: {error}", what)
            return False
        log.info("removed what a dead pool left", extra={"data": what})
        return True

    def _far_objects(self) -> list[Raw]:
        labels = f"{names.MANAGED_BY_LABEL}={names.FIELD_MANAGER},{names.POOL_UID_LABEL}"
        found = [raw for kind in ("ClusterRoleBinding", "RoleBinding") for raw in self._list(kind, labels=labels)]
        found += self._list("Job", labels=f"{labels},{names.COMPONENT_LABEL}={names.PURGE}")
        found += self._list("Secret", namespace=self._operator_namespace, labels=labels)
        return [raw for raw in found if not raw["metadata"].get("deletionTimestamp") and not _has_owner(raw)]

    def _list(self, kind: str, *, labels: str, namespace: str | None = None) -> list[Raw]:
        try:
            return list(self._kube.list_all(kind, namespace=namespace, labels=labels))
        except ForbiddenError as error:
            self._say(f"cannot look for what dead pools left: give the operator the rights of its chart: {error}", {})
            return []

    def _say(self, message: str, what: dict[str, str | None]) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning(message, extra={"data": what})


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
