"""What is to be reconciled next.

Invariant: a key is in the queue at most once and is worked on by at most one thread; a key added while it is worked on is
worked on again afterwards. So the queue is never longer than there are pools.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_CAP_SECONDS = 60.0
"""A pool that cannot be reconciled is tried again at least every minute."""

K = TypeVar("K", bound=Hashable)


def backoff_seconds(failures: int, jitter: float) -> float:
    """Pause after the n-th failure in a row (from 1). `jitter`: 0 to 1, spreads by a half."""
    pause = min(BACKOFF_CAP_SECONDS, BACKOFF_FIRST_SECONDS * float(2 ** min(failures - 1, 16)))
    return pause * (0.75 + 0.5 * jitter)


class WorkQueue(Generic[K]):
    """Delayed, deduplicated. Thread-safe."""

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        self._monotonic = monotonic
        self._jitter = jitter
        self._changed = threading.Condition()
        self._due: dict[K, float] = {}
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}
        self._closed = False

    def __len__(self) -> int:
        """Keys that wait."""
        return len(self._due)

    def add(self, key: K, delay_seconds: float = 0.0) -> None:
        """Have a key worked on in `delay_seconds` at the latest."""
        due = self._monotonic() + delay_seconds
        with self._changed:
            if not self._closed and due < self._due.get(key, float("inf")):
                self._due[key] = due
                self._changed.notify()

    def take(self, timeout_seconds: float) -> K | None:
        """The next due key, to be given back by `done` or `failed`; None at the timeout or when closed."""
        deadline = self._monotonic() + timeout_seconds
        with self._changed:
            while not self._closed:
                now = self._monotonic()
                key, due = self._next()
                if key is not None and due <= now:
                    del self._due[key]
                    self._busy.add(key)
                    return key
                if now >= deadline:
                    return None
                self._changed.wait(min(due, deadline) - now)
            return None

    def done(self, key: K, again_in_seconds: float | None = None) -> None:
        """The work on a key ended well."""
        self._failures.pop(key, None)
        self._give_back(key)
        if again_in_seconds is not None:
            self.add(key, again_in_seconds)

    def failed(self, key: K) -> None:
        """The work on a key failed: again, after a growing pause."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._give_back(key)
        self.add(key, backoff_seconds(failures, self._jitter()))

    def close(self) -> None:
        """Give nothing out any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget what waits: this replica leads no more."""
        with self._changed:
            self._due.clear()
            self._failures.clear()

    @property
    def busy(self) -> int:
        """Keys that are worked on."""
        return len(self._busy)

    def _give_back(self, key: K) -> None:
        with self._changed:
            self._busy.discard(key)
            self._changed.notify()

    def _next(self) -> tuple[K | None, float]:
        free = ((due, key) for key, due in self._due.items() if key not in self._busy)
        best: tuple[K | None, float] = (None, float("inf"))
        for due, key in free:
            if due < best[1]:
                best = (key, due)
        return best
