"""Slab allocation of the arena: where a payload lies and which slot number it has.

The capacity is cut into slabs of equal size. A span, one or a few neighbouring slabs, is assigned on demand to one size
class (a payload rounded up to 4 KiB), cut into chunks of it, and given back when its last chunk is freed. So several
models with other payload sizes share one arena without fragmenting it.

Pure. Invariant: chunks in use never overlap, lie inside the capacity, and have distinct slot numbers below `records`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache

CLASS_STEP_BYTES = 4096
"""Classes are multiples of a page: aligned copies, and few enough classes."""
SLAB_MAX_BYTES = 32 << 20
"""Aim for slabs of 32 MiB: at most 3 % of one is lost to a 1 MiB payload, and a slab soon empties."""
SLABS_MIN = 16
"""Small arenas still have that many slabs, so that two or three classes can live side by side."""
SLABS_MAX = 8192
"""Larger arenas get larger slabs, so that a search over all slabs stays short."""
SPAN_MAX_SLABS = 8
SPAN_WASTE = 0.125
"""A class takes more than one slab a span when otherwise over an eighth of it would be lost."""
PIECE_BYTES = 64 << 30
"""Engines register the arena with their device in pieces of this size; no chunk crosses the edge of one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A place in the arena: slot number and byte range."""

    slot: int
    offset: int
    class_bytes: int


@dataclass(slots=True)
class _Span:
    first_slab: int
    slabs: int
    class_bytes: int
    free: list[int]
    chunks: int
    taken: set[int] = field(default_factory=set)  # only during adoption

    @property
    def empty(self) -> bool:
        return len(self.free) == self.chunks


def slab_size(capacity_bytes: int) -> int:
    """Bytes of a slab: a power of two, so that slabs never cross the edge of a registered piece."""
    wished = max(min(SLAB_MAX_BYTES, capacity_bytes // SLABS_MIN), capacity_bytes // SLABS_MAX, CLASS_STEP_BYTES)
    return int(1 << (wished.bit_length() - 1))


def class_size(payload_bytes: int) -> int:
    """Bytes that a payload takes."""
    return -(-payload_bytes // CLASS_STEP_BYTES) * CLASS_STEP_BYTES


@lru_cache(maxsize=256)
def span_slabs(class_bytes: int, slab_bytes: int) -> int:
    """Slabs in a span of a class: the fewest with little waste, else those with the least; 0 = too large for a span."""
    best, best_waste = 0, 1.0
    for slabs in range(1, SPAN_MAX_SLABS + 1):
        size = slabs * slab_bytes
        waste = (size % class_bytes) / size if size >= class_bytes else 1.0
        if waste < best_waste:
            best, best_waste = slabs, waste
        if waste <= SPAN_WASTE:
            break
    return best or -(-class_bytes // slab_bytes)


class SlabAllocator:
    """Hands out chunks. `records`: how many slot numbers there are."""

    def __init__(self, capacity_bytes: int, records: int) -> None:
        self.slab_bytes = slab_size(capacity_bytes)
        self.slabs = capacity_bytes // self.slab_bytes
        self._records = records
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._span_at: list[_Span | None] = [None] * self.slabs
        self._free_slabs = list(range(self.slabs))  # a heap: low slabs first keeps long runs free
        self._open: dict[int, dict[int, _Span]] = {}
        self.used_bytes = 0

    @property
    def slots_numbered(self) -> int:
        """Slot numbers below this have been in use."""
        return self._next_slot

    def fits(self, payload_bytes: int) -> bool:
        """Whether a payload of this size can ever have a place here."""
        slabs = span_slabs(class_size(payload_bytes), self.slab_bytes)
        return payload_bytes > 0 and slabs <= min(self.slabs, PIECE_BYTES // self.slab_bytes)

    def allocate(self, payload_bytes: int) -> Chunk | None:
        """A place for a payload, or None when neither its class nor a free slab has room."""
        if not self._free_slots and self._next_slot >= self._records:
            return None
        class_bytes = class_size(payload_bytes)
        spans = self._open.setdefault(class_bytes, {})
        if not spans and not self._open_span(class_bytes):
            return None
        span = next(iter(spans.values()))
        offset = span.free.pop()
        if not span.free:
            del spans[span.first_slab]
        self.used_bytes += class_bytes
        return Chunk(self._take_slot(), offset, class_bytes)

    def free(self, chunk: Chunk) -> None:
        """Give a chunk back; an empty span's slabs are free for any class."""
        span = self._span_at[chunk.offset // self.slab_bytes]
        assert span is not None and span.class_bytes == chunk.class_bytes
        span.free.append(chunk.offset)
        heapq.heappush(self._free_slots, chunk.slot)
        self.used_bytes -= chunk.class_bytes
        spans = self._open.setdefault(chunk.class_bytes, {})
        spans[span.first_slab] = span
        if span.empty:
            self._close_span(span)

    def adopt(self, slot: int, offset: int, payload_bytes: int) -> Chunk | None:
        """Take a chunk of a former allocator over where it lies; None when it does not fit what is here.

        Call before the first `allocate`; end with `finish_adoption`.
        """
        class_bytes = class_size(payload_bytes)
        if slot >= self._records or not self.fits(payload_bytes):
            return None
        span = self._adopted_span(class_bytes, offset)
        if span is None or offset in span.taken:
            return None
        span.taken.add(offset)
        self.used_bytes += class_bytes
        return Chunk(slot, offset, class_bytes)

    def finish_adoption(self, used_slots: set[int], upper: int) -> None:
        """Slot numbers below `upper` were in use once; those not in `used_slots` are free."""
        self._next_slot = upper
        self._free_slots = sorted(set(range(upper)) - used_slots)
        for span in {id(span): span for span in self._span_at if span is not None}.values():
            span.free = [offset for offset in span.free if offset not in span.taken]
            span.taken = set()
            if not span.free:
                del self._open[span.class_bytes][span.first_slab]

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._next_slot += 1
        return self._next_slot - 1

    def _open_span(self, class_bytes: int) -> bool:
        slabs = span_slabs(class_bytes, self.slab_bytes)
        first = self._find_run(slabs)
        if first is None:
            return False
        self._place_span(first, slabs, class_bytes)
        return True

    def _find_run(self, slabs: int) -> int | None:
        """The first free run of `slabs` slabs inside one piece."""
        if slabs == 1:
            while self._free_slabs:
                slab = heapq.heappop(self._free_slabs)
                if self._span_at[slab] is None:
                    return slab
            return None
        run = 0
        per_piece = PIECE_BYTES // self.slab_bytes
        for slab in range(self.slabs):
            run = 0 if self._span_at[slab] is not None else 1 if slab % per_piece == 0 else run + 1
            if run == slabs:
                return slab - slabs + 1
        return None

    def _place_span(self, first: int, slabs: int, class_bytes: int) -> _Span:
        start = first * self.slab_bytes
        chunks = slabs * self.slab_bytes // class_bytes
        offsets = [start + number * class_bytes for number in reversed(range(chunks))]
        span = _Span(first, slabs, class_bytes, offsets, chunks)
        self._span_at[first : first + slabs] = [span] * slabs
        self._open.setdefault(class_bytes, {})[first] = span
        return span

    def _close_span(self, span: _Span) -> None:
        del self._open[span.class_bytes][span.first_slab]
        for slab in range(span.first_slab, span.first_slab + span.slabs):
            self._span_at[slab] = None
            heapq.heappush(self._free_slabs, slab)

    def _adopted_span(self, class_bytes: int, offset: int) -> _Span | None:
        """The span that has a chunk at `offset`, placed where it must have been: no two places fit (see span_slabs)."""
        slab = offset // self.slab_bytes
        if slab >= self.slabs:
            return None
        slabs = span_slabs(class_bytes, self.slab_bytes)
        for first in range(max(0, slab - slabs + 1), slab + 1):
            number, rest = divmod(offset - first * self.slab_bytes, class_bytes)
            if rest == 0 and number < slabs * self.slab_bytes // class_bytes:
                return self._placed(first, slabs, class_bytes)
        return None

    def _placed(self, first: int, slabs: int, class_bytes: int) -> _Span | None:
        span = self._span_at[first]
        if span is not None:
            return span if (span.first_slab, span.class_bytes) == (first, class_bytes) else None
        if first + slabs > self.slabs or any(self._span_at[first : first + slabs]):
            return None
        return self._place_span(first, slabs, class_bytes)
