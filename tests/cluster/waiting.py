"""Waiting for a condition instead of for luck."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tests.cluster.errors import ClusterError

T = TypeVar("T")
POLL_SECONDS = 0.25


def wait_for(condition: Callable[[], T], *, seconds: float, what: str, explain: Callable[[], object] = lambda: "") -> T:
    """The first true value of `condition`; a ClusterError that says what did not come, and `explain()`."""
    end = time.monotonic() + seconds
    while True:
        try:
            value = condition()
            if value:
                return value
            problem = ""
        except (ClusterError, OSError) as error:  # what is being replaced does not answer for a moment
            problem = f" ({error})"
        if time.monotonic() > end:
            raise ClusterError(f"not within {seconds:g} s: {what}{problem} {explain()}".rstrip())
        time.sleep(POLL_SECONDS)
