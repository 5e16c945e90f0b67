"""A condition's message for a column of a table.

Pure. Invariant: a headline is one line of at most HEADLINE_MAX characters, and the whole message where that fits.
"""

from __future__ import annotations

HEADLINE_MAX = 100
"""What `kubectl get` shows beside the other columns on a wide terminal; `kubectl describe` shows all."""


def headline(message: str) -> str:
    """The beginning of a message, cut between two words."""
    line = " ".join(message.split())
    if len(line) <= HEADLINE_MAX:
        return line
    kept = line[: HEADLINE_MAX - 1]
    words, space, _ = kept.rpartition(" ")
    return (words if space else kept).rstrip(" ,:;(") + "…"
