"""Speculative entries: blocks of requests just routed, held until the engine's own events can have arrived.

Invariant: an entry counts for at least the time it was added for and at most one bucket's width longer; every bucket
holds whole chains from their first block, so that one look-up tells whether a bucket matters for a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

_BUCKETS_PER_LIFE = 4
_BUCKET_BLOCKS = 262_144
"""Bound of one bucket; beyond, further chains are not remembered (they are only a hint)."""


class SpeculativeBlocks:
    """Short hash -> holder mask, in buckets by the time they expire."""

    def __init__(self, life_seconds: float) -> None:
        self._life_seconds = life_seconds
        self._width_seconds = life_seconds / _BUCKETS_PER_LIFE
        self._buckets: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, holder: int, chain: Sequence[int], *, now: float, extra_seconds: float = 0.0) -> None:
        """`holder` will have the chain's blocks soon; believed for the life plus `extra_seconds`."""
        self._expire(now)
        slot = int((now + self._life_seconds + extra_seconds) / self._width_seconds)
        bucket = self._buckets.setdefault(slot, {})
        if len(bucket) + len(chain) > _BUCKET_BLOCKS:
            return
        for block in chain:
            bucket[block] = bucket.get(block, 0) | holder

    def overlay(self, masks: list[int], chain: Sequence[int], *, now: float) -> list[int]:
        """`masks` of the chain's blocks with the speculative holders added."""
        self._expire(now)
        for bucket in self._buckets.values():
            for position, block in enumerate(chain):
                mask = bucket.get(block)
                if mask is None:
                    break
                masks[position] |= mask
        return masks

    def forget(self, holder: int) -> None:
        """Drop a holder that is gone, so that its bit may be handed out again."""
        for slot, bucket in self._buckets.items():
            kept = {block: mask & ~holder for block, mask in bucket.items()}
            self._buckets[slot] = {block: mask for block, mask in kept.items() if mask}

    def _expire(self, now: float) -> None:
        current = int(now / self._width_seconds)
        for slot in [slot for slot in self._buckets if slot < current]:
            del self._buckets[slot]
