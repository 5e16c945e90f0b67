"""The circuit breaker of one shard: leave it alone after failures, probe it, use it again.

Pure, with time as an argument. Invariant: between opening and the first success of a probe nothing but one probe at a
time is let through.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class BreakerState(enum.Enum):
    """closed = in use, open = left alone, half-open = one probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class Breaker:
    """`failures` in a row while closed; `probe_at`: when the next probe may start, also after a lost one."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    probe_at: float = 0.0


def is_closed(breaker: Breaker) -> bool:
    """Whether traffic may use the shard."""
    return breaker.state is BreakerState.CLOSED


def is_probe_due(breaker: Breaker, *, now: float) -> bool:
    """Whether a probe may start now."""
    return breaker.state is not BreakerState.CLOSED and now >= breaker.probe_at


def begin_probe(breaker: Breaker, *, now: float, give_up_seconds: float) -> Breaker:
    """A probe starts; if it is never heard of again another may start after `give_up_seconds`."""
    return replace(breaker, state=BreakerState.HALF_OPEN, probe_at=now + give_up_seconds)


def after_success(breaker: Breaker) -> Breaker:
    """An answer came. One that was asked for before the breaker opened does not close it."""
    return breaker if breaker.state is BreakerState.OPEN else Breaker()


def after_failure(breaker: Breaker, *, now: float, threshold: int, at_once: bool, open_seconds: float) -> Breaker:
    """A failure. `at_once`: open without waiting for `threshold` in a row. `open_seconds`: jitter included."""
    if breaker.state is BreakerState.OPEN:
        return breaker
    failures = breaker.failures + 1
    if breaker.state is BreakerState.CLOSED and failures < threshold and not at_once:
        return replace(breaker, failures=failures)
    return Breaker(state=BreakerState.OPEN, failures=failures, probe_at=now + open_seconds)
