"""Whose an object is.

Pure. Invariant: an object of the right name that does not say that it is this pool's is never written, whatever it looks like.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.observed import Pod
from kvpool_operator.pool import Pool

Raw = Mapping[str, Any]


class Claim(enum.Enum):
    """What may be done with an object of a planned name."""

    ABSENT = "absent"
    """Make it."""
    OURS = "ours"
    """Keep it as planned."""
    GOING = "going"
    """Ours, or a former pool's, and being deleted: wait."""
    LEFT_OVER = "left over"
    """A former pool's that nobody removes by itself: delete it."""
    FOREIGN = "foreign"
    """Leave it alone and say so."""


def claim(meta: Raw | None, pool: Pool) -> Claim:
    """Of an object by its metadata (None: there is none)."""
    if meta is None:
        return Claim.ABSENT
    labels = meta.get("labels") or {}
    owners = [one for one in meta.get("ownerReferences") or () if one.get("kind") == names.KIND]
    is_ours = labels.get(names.POOL_UID_LABEL) == pool.uid or any(one.get("uid") == pool.uid for one in owners)
    if is_ours:
        return Claim.GOING if meta.get("deletionTimestamp") else Claim.OURS
    if not _is_of_former(labels, pool):
        return Claim.FOREIGN
    if owners or meta.get("deletionTimestamp"):
        return Claim.GOING  # the garbage collector is on its way
    is_far = meta.get("namespace") != pool.namespace
    return Claim.LEFT_OVER if is_far else Claim.FOREIGN  # orphaned on purpose: it is the user's now


def _is_of_former(labels: Raw, pool: Pool) -> bool:
    return (
        labels.get(names.MANAGED_BY_LABEL) == names.FIELD_MANAGER
        and labels.get(names.POOL_LABEL) == pool.name
        and labels.get(names.POOL_NAMESPACE_LABEL) == pool.namespace
        and bool(labels.get(names.POOL_UID_LABEL))
    )


def is_of_workload(pod: Pod, pool: Pool) -> bool:
    """Whether a pod says that one of the pool's workloads made it: its labels alone could be anybody's."""
    owner = pod.owner
    made_by = {
        names.AGENT: owner.kind == "DaemonSet" and owner.name == names.agent_name(pool),
        names.ROUTER: owner.kind == "ReplicaSet" and owner.name.rpartition("-")[0] == names.router_name(pool),
        names.VALKEY: owner.kind == "StatefulSet" and owner.name == names.valkey_name(pool),
        names.PURGE: owner.kind == "Job" and owner.name == names.purge_name(pool),
    }
    return pod.namespace == pool.namespace and made_by.get(pod.component, False)


def is_made_for(meta: Raw, pool: Pool) -> bool:
    """Whether an object that says it is the pool's was made by us: people copy objects with their labels."""
    if meta.get("namespace") == pool.namespace:
        return any(one.get("uid") == pool.uid and one.get("controller") for one in meta.get("ownerReferences") or ())
    return meta["name"] in {names.far_name(pool, component) for component in (names.AGENT, names.ROUTER)}


def fingerprint(live: Raw, planned: Manifest) -> str:
    """Changes whenever somebody changes a field of ours; stays when only a controller writes status."""
    meta, wanted = live["metadata"], planned["metadata"]
    if "generation" not in meta:
        return f"{meta.get('uid')}/{meta.get('resourceVersion')}"
    ours = {
        "uid": meta.get("uid"),
        "generation": meta["generation"],
        "labels": {key: (meta.get("labels") or {}).get(key) for key in wanted.get("labels") or {}},
        "annotations": {key: (meta.get("annotations") or {}).get(key) for key in wanted.get("annotations") or {}},
        "owners": sorted(str(one.get("uid")) for one in meta.get("ownerReferences") or ()),
    }
    return names.digest(ours)


def identity(manifest: Raw) -> tuple[str, str, str]:
    """(kind, namespace or "", name)."""
    meta = manifest["metadata"]
    return manifest["kind"], meta.get("namespace") or "", meta["name"]


def title(manifest: Raw) -> str:
    """For people."""
    kind, namespace, name = identity(manifest)
    return f"{kind} {namespace}/{name}" if namespace else f"{kind} {name}"
