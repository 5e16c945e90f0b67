"""Whether an engine has waited too long for its domain, and for what: without it there are no hits and no stores.

Pure; times are time.monotonic() seconds. Invariant: it is said once for each connection, and only while the agent is there
and has not refused: those have lines of their own.
"""

from __future__ import annotations

WEIGHTS_SECONDS = 600.0
"""For identifying the engine: a terabyte of weights that the page cache holds, or hundreds of gigabytes that it does not."""
AGREED_SECONDS = 60.0
"""From then on until all ranks have registered: they do when their cache is made, before the engine serves."""

_WEIGHTS = (
    "its weights are still being read: that is done once on a node, at the speed of the volume they lie on; "
    "a hub cache that names files by their digest saves it"
)
_SILENT = "the agent has not answered: look at its log, and restart its pod if it stays silent"
_INCOMPLETE = (
    "the agent says {reason!r}: look for `kvpool` in the logs of this engine's workers, and restart the engine"
)


class DomainWait:
    """Of one scheduler's connection."""

    def __init__(self) -> None:
        self._is_registered = False
        self._limit = WEIGHTS_SECONDS
        self._since: float | None = None
        self._reason: str | None = None
        self._is_settled = False
        self._has_complained = False

    def begin(self, now: float) -> None:
        """The connection stands."""
        self.end()
        self._since = now

    def registered(self, now: float) -> None:
        """The engine is identified, and the agent was told."""
        if not self._is_registered:
            self._is_registered, self._limit = True, AGREED_SECONDS
            self._since = now if self._since is not None else None

    def told(self, state: str, reason: str, now: float) -> None:
        """The agent said what it knows of the domain."""
        if self._is_settled:
            self._since = now  # a rank that was there is lost
        self._is_settled = state != "pending"
        self._reason = reason

    def end(self) -> None:
        """There is no connection."""
        self._since = self._reason = None
        self._is_settled = self._has_complained = False

    def is_overdue(self, now: float) -> bool:
        """Whether the domain should be known by now."""
        return self._since is not None and not self._is_settled and now - self._since >= self._limit

    def complaint(self, now: float) -> str:
        """What is missing and what to do, once; "" otherwise."""
        if self._has_complained or not self.is_overdue(now):
            return ""
        self._has_complained = True
        return f"no blocks are loaded or stored, the domain is not known after {self._limit:g} s: {self.missing}"

    @property
    def missing(self) -> str:
        """What the domain waits for, and what to do about it."""
        if not self._is_registered:
            return _WEIGHTS
        return _SILENT if self._reason is None else _INCOMPLETE.format(reason=self._reason)
