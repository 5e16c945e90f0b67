"""What Valkey holds as far as this agent has seen: a hint, since Valkey evicts silently.

Pure. Invariant: at most `limit` hints, the oldest forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

HINTS_MAX = 250_000
"""About 75 MB at most; 512 GiB of blocks of 2 MiB."""

Place = tuple[bytes, int]
"""(domain, group)"""


class ValkeyHints:
    """Blocks seen in Valkey."""

    def __init__(self, limit: int = HINTS_MAX) -> None:
        self._limit = limit
        self._seen: OrderedDict[tuple[bytes, int, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def has(self, domain: bytes, group: int, block_hash: bytes) -> bool:
        """Whether the block was seen and not missed since."""
        return (domain, group, block_hash) in self._seen

    def add(self, domain: bytes, group: int, block_hash: bytes) -> None:
        """Remember a block; where there are too many the oldest is forgotten for it."""
        self._seen[domain, group, block_hash] = None
        self._seen.move_to_end((domain, group, block_hash))
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def remove(self, domain: bytes, group: int, block_hash: bytes) -> None:
        """Forget a block."""
        self._seen.pop((domain, group, block_hash), None)

    def clear(self) -> None:
        """Forget all."""
        self._seen.clear()

    def by_place(self) -> Iterator[tuple[Place, list[bytes]]]:
        """Yield the hashes of each (domain, group)."""
        places: dict[Place, list[bytes]] = {}
        for domain, group, block_hash in self._seen:
            places.setdefault((domain, group), []).append(block_hash)
        yield from places.items()
