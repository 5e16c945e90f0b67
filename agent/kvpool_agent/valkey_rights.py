"""What to do when Valkey's access control refuses a command of ours.

Pure. Invariant: NEEDED_RIGHTS is what the documentation asks for, and enough for the agent and for the purge.
"""

from __future__ import annotations

import re

NEEDED_RIGHTS = "+@read +@write +@connection +cluster +info"
"""INFO and CLUSTER lie in categories that hold dangerous commands too, so they are given by name."""

_COMMAND = re.compile(r"run the '([^']+)' command")


def remedy_of(refusal: str) -> str:
    """The right that the user lacks by the server's own words, and what it should have."""
    command = _COMMAND.search(refusal)
    lacking = f"the user lacks +{command[1]}" if command else f"the user lacks a right ({refusal})"
    return f"{lacking}: give it {NEEDED_RIGHTS} on keys that begin with the pool's key prefix"
