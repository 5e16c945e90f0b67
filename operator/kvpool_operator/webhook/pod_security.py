"""The Pod Security level that a namespace enforces by its labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping

ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"
LEVELS = ("privileged", "baseline", "restricted")


def enforced_level(labels: Mapping[str, str]) -> str:
    """The level, whatever its version: hostPath is refused by baseline and restricted in every one.

    The API server treats a value that is no level as `restricted`.
    """
    level = labels.get(ENFORCE_LABEL, "privileged")
    return level if level in LEVELS else "restricted"
