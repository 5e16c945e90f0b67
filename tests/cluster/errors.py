"""What goes wrong with the test cluster, said so that somebody can act on it."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """The cluster could not do what was asked; the message names the part, and what to do or where to look."""
