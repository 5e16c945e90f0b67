"""Payload sizes of blocks by domain and group, learnt from what was moved.

Invariant: all blocks of a group in a domain have one payload size, so the last one seen is the right one.
"""

from __future__ import annotations

import threading

from kvpool_agent.valkey_keys import BlockKey

MAX_REMEMBERED = 4096


class PayloadSizes:
    """Bounded memory of sizes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[tuple[bytes, int], int] = {}

    def learn(self, key: BlockKey, payload_bytes: int) -> None:
        """A block of this size was moved."""
        with self._lock:
            if len(self._sizes) >= MAX_REMEMBERED and (key.domain, key.group) not in self._sizes:
                del self._sizes[next(iter(self._sizes))]
            self._sizes[key.domain, key.group] = payload_bytes

    def get(self, key: BlockKey) -> int | None:
        """Payload bytes of a block; None when none of its group was moved yet."""
        return self._sizes.get((key.domain, key.group))
