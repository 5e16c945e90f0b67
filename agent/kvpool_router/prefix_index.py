"""The prefix index: which holders have which blocks, by the low 8 bytes of the block hash.

Invariants: a holder's bit is in a mask only while that holder was told to hold the block; a retired holder's bit is
handed out again only after every mask was swept clear of it; there are never more than `max_entries` blocks.
Work per call is bounded by what the call names: dropping a holder is lazy, and a sweep cleans one shard at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

SHARDS = 256
"""Blocks are spread by their low byte: a sweep or a resize then stalls the loop for one shard only."""

_EVICT_DIVISOR = 16
"""An overfull shard loses this part of its entries at once, so that finding the oldest stays cheap."""

_INTERNED_MASKS = 65_536
"""Distinct masks kept for sharing; beyond, sharing starts anew (it only saves memory)."""


@dataclass(frozen=True, slots=True)
class TargetMask:
    """Holders that serve one routing target, as bit masks; 0 where there is none."""

    gpu: int
    ram: int
    valkey: int

    @property
    def any(self) -> int:
        """All holders together."""
        return self.gpu | self.ram | self.valkey


@dataclass(frozen=True, slots=True)
class TierBlockCount:
    """Blocks of a prompt's start that a target has or can load, by the best tier."""

    gpu: int = 0
    ram: int = 0
    valkey: int = 0

    @property
    def total(self) -> int:
        """Length of the usable prefix in blocks."""
        return self.gpu + self.ram + self.valkey


NO_BLOCKS = TierBlockCount()


class PrefixIndex:
    """Short hash -> bit mask of holders."""

    def __init__(self, max_entries: int) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._shard_limit = max(1, max_entries // SHARDS)
        self._masks: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._next_bit = 0
        self._free: list[int] = []
        self._retired = 0
        self._sweeping = 0
        self._sweep_shard = 0
        self.evicted = 0
        """Entries dropped because the index was full, since the start."""

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    # --- holders ------------------------------------------------------------------------------------------------

    def acquire(self) -> int:
        """A new holder's mask (one bit), of which no block has any yet."""
        bit = self._free.pop() if self._free else self._next_bit
        self._next_bit = max(self._next_bit, bit + 1)
        holder = 1 << bit
        self._counts[holder] = 0
        return holder

    def retire(self, holder: int) -> None:
        """Forget a holder. Its bits stay in the masks until a sweep, where nobody asks for them."""
        if self._counts.pop(holder, None) is not None:
            self._retired |= holder

    def count(self, holder: int) -> int:
        """Blocks of a live holder."""
        return self._counts.get(holder, 0)

    @property
    def live_holders(self) -> int:
        """Number of holders that are not retired."""
        return len(self._counts)

    # --- blocks -------------------------------------------------------------------------------------------------

    def add(self, holder: int, hashes: Iterable[int]) -> None:
        """`holder` has these blocks; a retired holder gets none. A block counts as young again with each new holder."""
        if holder not in self._counts:
            return
        shards, limit, added = self._shards, self._shard_limit, 0
        for block in hashes:
            shard = shards[block & 255]
            before = shard.pop(block, 0)
            if before:
                shard[block] = self._interned(before | holder)
                added += not before & holder
                continue
            shard[block] = holder
            added += 1
            if len(shard) > limit:
                self._evict_oldest(shard)
        self._counts[holder] += added

    def discard(self, holders: int, hashes: Iterable[int]) -> None:
        """None of `holders` (a mask) has these blocks any more."""
        for block in hashes:
            shard = self._shards[block & 255]
            before = shard.get(block, 0)
            if before & holders:
                self._forget(before & holders)
                self._put(shard, block, before & ~holders)

    def masks(self, chain: Sequence[int]) -> list[int]:
        """For each block of the chain the mask of its holders, 0 for unknown blocks."""
        shards = self._shards
        return [shards[block & 255].get(block, 0) for block in chain]

    def _interned(self, mask: int) -> int:
        """One object for equal masks: there are few of them, and many blocks."""
        if len(self._masks) > _INTERNED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _put(self, shard: dict[int, int], block: int, mask: int) -> None:
        if mask:
            shard[block] = self._interned(mask)
        else:
            del shard[block]

    def _forget(self, holders: int) -> None:
        """Take one block off the counts of each live holder in the mask."""
        while holders:
            holder = holders & -holders
            holders ^= holder
            if holder in self._counts:
                self._counts[holder] -= 1

    def _evict_oldest(self, shard: dict[int, int]) -> None:
        oldest = list(islice(shard, max(1, self._shard_limit // _EVICT_DIVISOR)))
        for block in oldest:
            self._forget(shard.pop(block))
        self.evicted += len(oldest)

    # --- cleaning -----------------------------------------------------------------------------------------------

    @property
    def needs_sweep(self) -> bool:
        """Whether retired holders wait for their bits to be cleaned."""
        return bool(self._retired or self._sweeping)

    def sweep(self) -> None:
        """Clean one shard; after a whole round the retired holders' bits may be handed out again."""
        if not self._sweeping:
            self._sweeping, self._retired, self._sweep_shard = self._retired, 0, 0
        if not self._sweeping:
            return
        self._clean(self._shards[self._sweep_shard], self._sweeping)
        self._sweep_shard += 1
        if self._sweep_shard == SHARDS:
            self._end_round()

    def _clean(self, shard: dict[int, int], gone: int) -> None:
        dirty = [(block, mask & ~gone) for block, mask in shard.items() if mask & gone]
        for block, mask in dirty:
            self._put(shard, block, mask)

    def _end_round(self) -> None:
        self._masks = {mask: mask for mask in self._masks if not mask & self._sweeping}
        while self._sweeping:
            holder = self._sweeping & -self._sweeping
            self._sweeping ^= holder
            self._free.append(holder.bit_length() - 1)


def runs(masks: Sequence[int], interest: int) -> list[tuple[int, int]]:
    """Consecutive equal masks, cut to `interest`, as (mask, length), up to the first block that no one has."""
    result: list[tuple[int, int]] = []
    current, length = 0, 0
    for mask in masks:
        mask &= interest
        if mask == current and length:
            length += 1
            continue
        if length:
            result.append((current, length))
        if not mask:
            return result
        current, length = mask, 1
    if length:
        result.append((current, length))
    return result


def count_tiers(prefix: Sequence[tuple[int, int]], target: TargetMask) -> TierBlockCount:
    """How much of the prefix `target` has: leading blocks on its GPU, then what follows from `ram` or else `valkey`.

    An engine uses only the leading run of its own GPU blocks; what follows is loaded, whichever tier has it.
    """
    gpu = ram = valkey = 0
    on_gpu = True
    for mask, length in prefix:
        on_gpu = on_gpu and bool(mask & target.gpu)
        if on_gpu:
            gpu += length
        elif mask & target.ram:
            ram += length
        elif mask & target.valkey:
            valkey += length
        else:
            break
    return TierBlockCount(gpu, ram, valkey)
