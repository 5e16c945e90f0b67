"""The right to write.

Invariant: what changes something, be it at the API server, in Valkey or in an agent, is sent only while the fence is open
at the very moment of sending, and is given up before the fence can close: so a leader that was stopped past its lease changes
nothing when it goes on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvpool_operator.kube_errors import NotLeaderError

MARGIN_SECONDS = 0.5
"""A write that could not end this long before the lease does is not begun."""


class Fence(Protocol):
    """How long this process may still write."""

    def remaining_seconds(self) -> float:
        """Seconds; 0 or less when it may not."""


class OpenFence:
    """For what both replicas may write: the Lease itself, the webhook's certificate."""

    def remaining_seconds(self) -> float:
        """For ever."""
        return math.inf


def write_timeout(fence: Fence, wanted_seconds: float) -> float:
    """Timeout of a write; NotLeaderError when there is no time for one."""
    seconds = min(wanted_seconds, fence.remaining_seconds() - MARGIN_SECONDS)
    if seconds <= 0:
        raise NotLeaderError("this replica does not lead now: nothing was sent")
    return seconds


_sending = threading.local()


@contextmanager
def sending_under(fence: Fence) -> Iterator[None]:
    """What this thread sends meanwhile is checked by `check_before_send`."""
    _sending.fence = fence
    try:
        yield
    finally:
        _sending.fence = None


def check_before_send() -> None:
    """Called by connections right before bytes go out: a thread may have been stopped since the write was begun."""
    fence: Fence | None = getattr(_sending, "fence", None)
    if fence is not None and fence.remaining_seconds() <= 0:
        raise NotLeaderError("this replica lost its lease while it prepared a write: nothing was sent")
