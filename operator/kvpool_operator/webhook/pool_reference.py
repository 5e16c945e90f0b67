"""Which pool a pod asks for."""

from __future__ import annotations

import re

from kvpool_operator.webhook.contract import POOL, Manifest
from kvpool_operator.webhook.skip_reasons import POOL_NOT_NAMED, Skip

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def pool_reference(pod: Manifest, namespace: str) -> tuple[str, str] | Skip:
    """(namespace, name) from the annotation; a bare name is a pool of the pod's own namespace."""
    text = str((pod.get("metadata", {}).get("annotations") or {}).get(POOL, "")).strip()
    parts = text.split("/")
    if not text or len(parts) > 2 or not all(_NAME.fullmatch(part) for part in parts):
        found = f"is {text[:80]!r}" if text else "is missing"
        return Skip(POOL_NOT_NAMED, f"annotation {POOL} {found}: give it a pool's name, or namespace/name")
    return (namespace, parts[0]) if len(parts) == 1 else (parts[0], parts[1])
