"""Whether a verdict's leases still hold when the engine looks, and how often it asks anew when they do not.

Pure. Invariant: a request whose leases ended although the engine looked as soon as it could after asking anew is given up, so
steps of the engine that are longer than a lease end in misses, never in waiting for ever. One that vLLM did not look at for
many steps, since it had no room for it, is asked about ASKED_AGAIN_MAX times in a row: each time it may lose its seat to
another request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

LEASE_MARGIN_SECONDS = 0.5
"""A lease that ends sooner than this is asked for anew rather than relied upon."""
SOON_STEPS = 2
"""After asking anew vLLM looks in the next step, or in the one after it when the verdict came late."""
ASKED_AGAIN_MAX = 3
"""Each question costs a request its turn in one step, which in a full engine may be its only one for long."""


class Reliance(enum.Enum):
    """What to do with a verdict."""

    HOLDS = enum.auto()
    ASK_AGAIN = enum.auto()
    GIVE_UP = enum.auto()


@dataclass(slots=True)
class LeaseWear:
    """Of one request, over all its lookups, since a final verdict last held: how often it was asked anew, last in which step."""

    asked_again: int = 0
    asked_again_at: int = 0

    def judge(self, *, lease_until_ns: int | None, final: bool, now_ns: int, step: int) -> Reliance:
        """lease_until_ns: None when the verdict leases nothing, or there is none yet: that does not wear out."""
        if lease_until_ns is None:
            return Reliance.HOLDS
        if now_ns < lease_until_ns - int(LEASE_MARGIN_SECONDS * 1e9):
            self.asked_again = 0 if final else self.asked_again
            return Reliance.HOLDS
        is_soon = not final or step - self.asked_again_at <= SOON_STEPS
        if self.asked_again >= ASKED_AGAIN_MAX or (self.asked_again and is_soon):
            return Reliance.GIVE_UP
        self.asked_again += 1
        self.asked_again_at = step
        return Reliance.ASK_AGAIN
