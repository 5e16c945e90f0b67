"""Whether a new leader has seen enough to begin a rollout.

Invariant: until every pool that was there when the term began was looked at once, it is not known whose agent is on its way, so no
serving agent is taken away. A look that failed counts: one broken pool must not keep the others as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

Key = tuple[str, str]


class FirstLooks:
    """Of one term. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: set[Key] | None = None
        self._looked: set[Key] = set()

    def expect(self, keys: Iterable[Key]) -> None:
        """The pools that there are; only the first call of a term counts."""
        with self._lock:
            if self._left is None:
                self._left = set(keys) - self._looked
                self._looked.clear()

    def looked(self, key: Key) -> None:
        """A pool was looked at, well or not."""
        with self._lock:
            if self._left is None:
                self._looked.add(key)
            else:
                self._left.discard(key)

    @property
    def are_done(self) -> bool:
        """Whether a rollout may begin."""
        with self._lock:
            return self._left is not None and not self._left
