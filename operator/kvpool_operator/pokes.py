"""Which pools an event is about.

Pure but for what is remembered of nodes, namespaces and pools. Invariant: an event only ever leads to a look at pools; nothing is
decided from what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool_operator import names

Key = tuple[str, str]
Raw = Mapping[str, Any]

CLUSTER_KINDS = frozenset({"Node", "Namespace"})
"""Events of these may be about any pool."""


def pool_key(kind: str, raw: Raw) -> Key | None:
    """The pool that an object belongs to or names; None when it is none."""
    meta = raw.get("metadata") or {}
    if kind == names.KIND:
        return meta.get("namespace", ""), meta.get("name", "")
    labels = meta.get("labels") or {}
    if labels.get(names.POOL_LABEL) and labels.get(names.POOL_NAMESPACE_LABEL):
        return labels[names.POOL_NAMESPACE_LABEL], labels[names.POOL_LABEL]
    for owner in meta.get("ownerReferences") or ():
        if owner.get("kind") == names.KIND:
            return meta.get("namespace", ""), owner.get("name", "")
    return None


class News:
    """Tells changes of nodes, namespaces and pools that matter from heartbeats and from what we write into status ourselves."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def is_news(self, kind: str, raw: Raw, *, is_gone: bool) -> bool:
        """Whether pools must be looked at because of it."""
        meta = raw.get("metadata") or {}
        name = (kind, f"{meta.get('namespace', '')}/{meta.get('name', '')}")
        if is_gone:
            return self._known.pop(name, None) is not None
        now = names.digest(_what_matters(kind, raw))
        before, self._known[name] = self._known.get(name), now
        return before != now


def _what_matters(kind: str, raw: Raw) -> list[object]:
    meta, spec, status = raw.get("metadata") or {}, raw.get("spec") or {}, raw.get("status") or {}
    labels = meta.get("labels") or {}
    if kind == names.KIND:
        kept = ("uid", "generation", "deletionTimestamp", "finalizers", "annotations")
        return [meta.get(part) for part in kept]
    if kind == "Namespace":
        return [labels, status.get("phase"), meta.get("deletionTimestamp")]
    ready = [one.get("status") for one in status.get("conditions") or () if one.get("type") == "Ready"]
    return [
        labels,
        ready,
        spec.get("taints"),
        spec.get("unschedulable"),
        (status.get("allocatable") or {}).get("memory"),
    ]
