"""Whether a verdict's leases still hold when the engine looks, and how often it asks anew when they do not.

Pure. Invariant: a request whose leases ended although the engine looked as soon as it could after asking anew is given up, so
steps of the engine that are longer than a lease end in misses, never in waiting for ever. One that vLLM did not look at for
many steps, since it had no room for it, is asked about as often as its leases end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

LEASE_MARGIN_SECONDS = 0.5
"""A lease that ends sooner than this is asked for anew rather than relied upon."""
SOON_STEPS = 2
"""After asking anew vLLM looks in the next step, or in the one after it when the verdict came late."""


class Reliance(enum.Enum):
    """What to do with a verdict."""

    HOLDS = enum.auto()
    ASK_AGAIN = enum.auto()
    GIVE_UP = enum.auto()


@dataclass(slots=True)
class LeaseWear:
    """Of one request, over all its lookups. `asked_again_at`: the step, since a final verdict last held; None: not."""

    asked_again_at: int | None = None

    def judge(self, *, lease_until_ns: int | None, final: bool, now_ns: int, step: int) -> Reliance:
        """lease_until_ns: None when the verdict leases nothing, or there is none yet: that does not wear out."""
        if lease_until_ns is None:
            return Reliance.HOLDS
        if now_ns < lease_until_ns - int(LEASE_MARGIN_SECONDS * 1e9):
            self.asked_again_at = None if final else self.asked_again_at
            return Reliance.HOLDS
        if self.asked_again_at is not None and (not final or step - self.asked_again_at <= SOON_STEPS):
            return Reliance.GIVE_UP
        self.asked_again_at = step
        return Reliance.ASK_AGAIN
