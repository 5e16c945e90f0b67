"""Whether a verdict's leases still hold when the engine looks, and how often it asks anew when they do not.

Pure. Invariant: a request is asked about anew at most once without a final verdict in between whose leases held, so steps of
the engine that are longer than a lease end in misses, never in waiting for ever.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

LEASE_MARGIN_SECONDS = 0.5
"""A lease that ends sooner than this is asked for anew rather than relied upon."""


class Reliance(enum.Enum):
    """What to do with a verdict."""

    HOLDS = enum.auto()
    ASK_AGAIN = enum.auto()
    GIVE_UP = enum.auto()


@dataclass(slots=True)
class LeaseWear:
    """Of one request, over all its lookups. `was_asked_again`: since a final verdict last held."""

    was_asked_again: bool = False

    def judge(self, *, lease_until_ns: int | None, final: bool, now_ns: int) -> Reliance:
        """lease_until_ns: None when the verdict leases nothing, or there is none yet: that does not wear out."""
        if lease_until_ns is None:
            return Reliance.HOLDS
        if now_ns < lease_until_ns - int(LEASE_MARGIN_SECONDS * 1e9):
            self.was_asked_again = self.was_asked_again and not final
            return Reliance.HOLDS
        if self.was_asked_again:
            return Reliance.GIVE_UP
        self.was_asked_again = True
        return Reliance.ASK_AGAIN
