"""The blocks in the engine's own cache, told to the agent: events as they happen, a snapshot after each connect.

vLLM drains its event queue once a step; this reads the queue just before that, and now and then while the engine idles (a
reset of its cache is an event that no step follows). Invariant: each event is told once and in order, a snapshot and the
events around it never cross: everything is read and sent under one lock, snapshots only while nothing can be cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

from kvpool_core import wire
from kvpool_core.block_hash import HASH_BYTES, short_hash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

SNAPSHOT_PIECE = 200_000
"""Blocks in one snapshot frame (about 3 MB); more are not reported: such a pool is past any router's bounded index."""


class GpuBlocks:
    """Reads the engine's block pool."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._seen: list[KVCacheEvent] = []
        self._seen_count = 0
        self._lock = threading.Lock()
        self._is_snapshot_due = False

    def ask_for_snapshot(self) -> None:
        """The agent knows nothing of this cache yet."""
        self._is_snapshot_due = True

    def report(self, send: Callable[[wire.Message], bool], *, is_quiet: Callable[[], bool]) -> None:
        """Send what the agent has not heard. `is_quiet`: whether no step can change the cache at this moment."""
        with self._lock:
            if not self._is_snapshot_due:
                events = self._new_events()
                if events is not None:
                    send(events)
            elif is_quiet():
                snapshot = self._snapshot()
                if is_quiet():
                    self._is_snapshot_due = not send(snapshot)

    def bind(self, pool: BlockPool) -> None:
        """The pool exists now."""
        self._pool = pool

    def leading_blocks(self, keys: Iterable[bytes]) -> int:
        """How many of a request's keys, from the first on, the cache holds. A key is hash and group, vLLM's own form."""
        if self._pool is None:
            return 0
        held = 0
        for key in keys:
            if self._pool.cached_block_hash_to_block.get_one_block(key) is None:
                break
            held += 1
        return held

    def _snapshot(self) -> wire.GpuSnapshot:
        """All cached blocks with the number of physical blocks of each; pending events are part of it already."""
        groups: list[int] = []
        hashes: list[int] = []
        counts: list[int] = []
        if self._pool is not None:
            self._mark_seen(self._pool.kv_event_queue, len(self._pool.kv_event_queue))
            for key, blocks in list(self._pool.cached_block_hash_to_block._cache.items())[:SNAPSHOT_PIECE]:
                groups.append(int.from_bytes(key[HASH_BYTES:], "big"))
                hashes.append(short_hash(key[:HASH_BYTES]))
                counts.append(len(blocks) if isinstance(blocks, dict) else 1)
        return wire.GpuSnapshot(0, groups, hashes, counts)

    def _new_events(self) -> wire.GpuEvents | None:
        """Events since the last call, None when there are none."""
        if self._pool is None:
            return None
        pending = self._pool.kv_event_queue
        start = self._seen_count if pending is self._seen else 0
        new = pending[start:]  # once: on the client's thread more may come meanwhile, and must not be told twice
        self._mark_seen(pending, start + len(new))
        kinds: list[str] = []
        groups: list[int] = []
        hashes: list[int] = []
        for event in new:
            for kind, group, number in _flat(event):
                kinds.append(kind)
                groups.append(group)
                hashes.append(number)
        return wire.GpuEvents(0, "".join(kinds), groups, hashes) if kinds else None

    def _mark_seen(self, pending: list[KVCacheEvent], count: int) -> None:
        self._seen, self._seen_count = pending, count


def _flat(event: KVCacheEvent) -> Iterable[tuple[str, int, int]]:
    if isinstance(event, AllBlocksCleared):
        return [("c", 0, 0)]
    if isinstance(event, BlockStored | BlockRemoved):
        kind = "s" if isinstance(event, BlockStored) else "r"
        return [(kind, event.group_idx or 0, _number(block_hash)) for block_hash in event.block_hashes]
    return []


def _number(block_hash: int | bytes) -> int:
    """vLLM's events carry the low 8 bytes as an integer, or all bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    return block_hash if isinstance(block_hash, int) else short_hash(block_hash)
