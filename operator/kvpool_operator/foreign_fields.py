"""What others set in a workload beside the fields that we apply: a sidecar, a variable, an affinity.

Pure. Server-side apply leaves to others what it is not told. Once such fields are put down as ours, the next apply removes them,
since it does not name them. Invariant: metadata, status, what was written through a subresource, and what `kubectl rollout
restart` writes stay whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool_operator.names import FIELD_MANAGER, Manifest

Raw = Mapping[str, Any]
Fields = dict[str, Any]
"""FieldsV1: a tree of field names."""

WORKLOADS = frozenset({"DaemonSet", "Deployment", "StatefulSet"})
"""Of these nothing is for others to set. A Service's load balancer has settings that no pool has."""


def claimed_fields(live: Raw) -> list[Manifest] | None:
    """`metadata.managedFields` in which what others set in a workload's spec is ours; None when they set nothing there."""
    entries = live["metadata"].get("managedFields") or ()
    ours = next((one for one in entries if _is_ours(one)), None)
    if live.get("kind") not in WORKLOADS or ours is None:
        return None
    claimed: Fields = dict(ours["fieldsV1"])
    others: list[Manifest] = []
    is_any_foreign = False
    for one in entries:
        foreign = {} if _is_ours(one) or one.get("subresource") else _settings(one.get("fieldsV1") or {})
        if foreign:
            is_any_foreign = True
            claimed = _union(claimed, {"f:spec": foreign})
            one = _without_settings(one)
        if one is not None and not _is_ours(one):
            others.append(one)
    return [{**ours, "fieldsV1": claimed}, *others] if is_any_foreign else None


def _is_ours(entry: Raw) -> bool:
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource")


def _settings(fields: Fields) -> Fields:
    """What of `spec` is nobody's business but ours."""
    spec = dict(fields.get("f:spec") or {})
    if "f:template" in spec:
        spec["f:template"] = {key: value for key, value in spec["f:template"].items() if key != "f:metadata"}
    return {key: value for key, value in spec.items() if value or key != "f:template"}


def _without_settings(entry: Manifest) -> Manifest | None:
    kept = {key: value for key, value in entry["fieldsV1"].items() if key != "f:spec"}
    restarted = ((entry["fieldsV1"].get("f:spec") or {}).get("f:template") or {}).get("f:metadata")
    if restarted:
        kept["f:spec"] = {"f:template": {"f:metadata": restarted}}
    return {**entry, "fieldsV1": kept} if kept else None


def _union(one: Fields, two: Fields) -> Fields:
    return {key: _union(one.get(key) or {}, two.get(key) or {}) for key in {**one, **two}}
