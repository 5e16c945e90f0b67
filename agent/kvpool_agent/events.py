"""The agent's event stream: what lies where, as a snapshot and ordered changes.

Invariant: a subscriber that applied snapshot and every delta since knows exactly what the agent knew at that delta; one
that cannot be served so is closed, never served with a gap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvpool_core.wire import (
    EngineInfo,
    EventsAlive,
    EventsBegin,
    EventsDelta,
    EventsPart,
    EventsReady,
    TierBlocks,
    encode,
)

QUEUE_MAX_BYTES = 64 << 20
"""Unread bytes of one subscriber: minutes of changes; a router that far behind is better off with a new snapshot."""
PART_BLOCKS = 50_000
"""Hashes per frame of a snapshot, about half a megabyte."""
DELTA_BLOCKS = 500_000
"""Hashes in one delta at most, far below the frame's limit."""
SUBSCRIBERS_MAX = 64

Scope = tuple[str, str, bytes, int]
"""(tier, engine id, domain, group)"""


class Subscriber:
    """One reader of the stream."""

    def __init__(self, frames: Iterable[bytes]) -> None:
        self._queue: deque[bytes] = deque(frames)
        self._bytes = sum(map(len, self._queue))
        self._limit = self._bytes + QUEUE_MAX_BYTES
        self._ready = asyncio.Event()
        self._ready.set()
        self.closed = False

    def push(self, frame: bytes) -> bool:
        """Queue a frame; False when the reader is too far behind: it is closed then."""
        if self.closed:
            return False
        if self._bytes + len(frame) > self._limit:
            self.close()
            return False
        self._queue.append(frame)
        self._bytes += len(frame)
        self._ready.set()
        return True

    async def next(self, timeout_seconds: float) -> bytes | None:
        """The next frames; b"" when nothing came in time, None when the stream is over."""
        if not self._queue and not self.closed:
            self._ready.clear()
            try:
                await asyncio.wait_for(self._ready.wait(), timeout_seconds)
            except TimeoutError:
                if not self._queue and not self.closed:  # a frame may have come in the very turn of the timeout
                    return b""
        if self.closed:
            return None
        frame = self._queue.popleft()
        self._bytes -= len(frame)
        return frame

    def close(self) -> None:
        """End the stream."""
        self.closed = True
        self._queue.clear()
        self._ready.set()


class EventHub:
    """Collects changes and sends them to subscribers. `snapshot` yields (engine, blocks) of everything present now."""

    def __init__(self, boot_id: bytes, *, on_dirty: Callable[[], None]) -> None:
        self._boot_id = boot_id
        self._on_dirty = on_dirty
        self._engines: dict[str, EngineInfo] = {}
        self._changes: dict[Scope, dict[int, bool]] = {}
        self._blocks = 0
        self._dirty = False
        self._subscribers: list[Subscriber] = []
        self.seq = 0
        self.overflows = 0

    def __len__(self) -> int:
        return len(self._subscribers)

    def engine(self, info: EngineInfo) -> None:
        """An engine came, changed or went."""
        if self._subscribers:
            self._engines[info.engine_id] = info
            self._mark()

    def change(self, scope: Scope, short_hash: int, *, stored: bool) -> None:
        """A block became present or absent in a tier."""
        if not self._subscribers:
            return
        self._changes.setdefault(scope, {})[short_hash] = stored
        self._blocks += 1
        self._mark()
        if self._blocks >= DELTA_BLOCKS:
            self.flush()

    def clear(self, scopes: Iterable[Scope]) -> None:
        """Everything in these scopes is gone: a delta of its own, so that order inside a delta never matters."""
        self.flush()
        cleared = [_blocks(scope, []) for scope in scopes]
        if self._subscribers and cleared:
            self._send([], [], [], cleared)

    def flush(self) -> None:
        """Send what has changed since the last time."""
        self._dirty = False
        if not self._engines and not self._changes:
            return
        stored, removed = [], []
        for scope, hashes in self._changes.items():
            present = [value for value, is_stored in hashes.items() if is_stored]
            absent = [value for value, is_stored in hashes.items() if not is_stored]
            stored += [_blocks(scope, present)] if present else []
            removed += [_blocks(scope, absent)] if absent else []
        engines = list(self._engines.values())
        self._engines, self._changes, self._blocks = {}, {}, 0
        self._send(engines, stored, removed, [])

    def subscribe(self, engines: Iterable[EngineInfo], blocks: Iterable[tuple[Scope, list[int]]]) -> Subscriber | None:
        """A new subscriber with everything present now; None when there are too many already."""
        self.flush()
        if len(self._subscribers) >= SUBSCRIBERS_MAX:
            return None
        subscriber = Subscriber(self._snapshot(list(engines), blocks))
        self._subscribers.append(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """The reader is gone."""
        subscriber.close()
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def alive(self) -> bytes:
        """What a silent stream is sent."""
        return encode(EventsAlive(0, self._boot_id, self.seq))

    def _snapshot(self, engines: list[EngineInfo], blocks: Iterable[tuple[Scope, list[int]]]) -> Iterator[bytes]:
        yield encode(EventsBegin(0, self._boot_id, self.seq))
        if engines:
            yield encode(EventsPart(0, engines, []))
        for scope, hashes in blocks:
            iterator = iter(hashes)
            while portion := list(islice(iterator, PART_BLOCKS)):
                yield encode(EventsPart(0, [], [_blocks(scope, portion)]))
        yield encode(EventsReady(0))

    def _send(
        self,
        engines: list[EngineInfo],
        stored: list[TierBlocks],
        removed: list[TierBlocks],
        cleared: list[TierBlocks],
    ) -> None:
        self.seq += 1
        frame = encode(EventsDelta(0, self._boot_id, self.seq, engines, stored, removed, cleared))
        for subscriber in list(self._subscribers):
            if not subscriber.push(frame):
                self.overflows += 1
                self.unsubscribe(subscriber)

    def _mark(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._on_dirty()


def _blocks(scope: Scope, hashes: list[int]) -> TierBlocks:
    tier, engine_id, domain, group = scope
    return TierBlocks(tier, engine_id, domain, group, hashes)
