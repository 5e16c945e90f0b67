"""Times as Kubernetes writes them.

Pure.
"""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(moment: datetime) -> str:
    """As Kubernetes writes times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(text: str, now: datetime) -> float:
    """Since an RFC 3339 time; 0 when it is none."""
    try:
        return (now - datetime.fromisoformat(text)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
