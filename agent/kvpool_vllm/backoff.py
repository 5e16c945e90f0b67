"""How long to wait before the next try to reach the agent.

Invariant: an agent that was there for a while is looked for at once; one that is absent, or breaks every connection, ever later.
"""

from __future__ import annotations

FIRST_SECONDS = 0.1
LAST_SECONDS = 2.0
STABLE_SECONDS = 5.0
"""A connection that stood so long was a good one."""


class Backoff:
    """Of one client."""

    def __init__(self) -> None:
        self._next = FIRST_SECONDS

    def after(self, stood_seconds: float, chance: float) -> float:
        """Seconds to wait after a connection that stood so long, 0 where there was none; chance: 0 to 1, for jitter."""
        if stood_seconds >= STABLE_SECONDS:
            self._next = FIRST_SECONDS
        seconds, self._next = self._next * (0.5 + 0.5 * chance), min(2 * self._next, LAST_SECONDS)
        return seconds
