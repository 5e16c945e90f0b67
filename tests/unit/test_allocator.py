"""The slab allocator against a naive model: what is handed out never overlaps and everything comes back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool_agent.allocator import Chunk, SlabAllocator, class_size, slab_size, span_slabs

CAPACITY = 64 << 20
RECORDS = 600
PAYLOADS = (1, 4096, 16 << 10, 100_000, 640 << 10, 2 << 20, (5 << 20) + 1, 20 << 20)


class AllocatorMachine(RuleBasedStateMachine):
    """The model is just the list of chunks handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlabAllocator(CAPACITY, RECORDS)
        self.chunks: list[tuple[Chunk, int]] = []

    @rule(payload=st.sampled_from(PAYLOADS))
    def allocate(self, payload: int) -> None:
        chunk = self.allocator.allocate(payload)
        if chunk is None:
            return
        assert chunk.class_bytes == class_size(payload)
        assert 0 <= chunk.offset <= CAPACITY - chunk.class_bytes
        assert 0 <= chunk.slot < RECORDS
        for other, _payload in self.chunks:
            apart = other.offset + other.class_bytes <= chunk.offset or chunk.offset + chunk.class_bytes <= other.offset
            assert apart
            assert other.slot != chunk.slot
        self.chunks.append((chunk, payload))

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.chunks) - 1))
        self.allocator.free(self.chunks.pop(index)[0])

    @rule()
    def free_everything_and_refill(self) -> None:
        for chunk, _payload in self.chunks:
            self.allocator.free(chunk)
        self.chunks.clear()
        large = [self.allocator.allocate(2 << 20) for _ in range(32)]
        assert None not in large
        assert self.allocator.allocate(2 << 20) is None
        for one in large:
            assert one is not None
            self.allocator.free(one)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """A successor adopts the chunks in any order and goes on."""
        successor = SlabAllocator(CAPACITY, RECORDS)
        order = data.draw(st.permutations(self.chunks))
        for chunk, payload in order:
            assert successor.adopt(chunk.slot, chunk.offset, payload) == chunk
            assert successor.adopt(chunk.slot, chunk.offset, payload) is None
        used = {chunk.slot for chunk, _payload in self.chunks}
        successor.finish_adoption(used, max(used, default=-1) + 1)
        self.allocator = successor

    @invariant()
    def used_bytes_add_up(self) -> None:
        assert self.allocator.used_bytes == sum(chunk.class_bytes for chunk, _payload in self.chunks)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(st.integers(64, 16 << 20))
def test_slabs_are_powers_of_two_of_bounded_number(capacity_mib: int) -> None:
    capacity = capacity_mib << 20
    size = slab_size(capacity)
    assert size & (size - 1) == 0
    assert 16 <= capacity // size <= 2 * 8192


@given(st.integers(1, 64 << 20), st.integers(22, 26).map(lambda bits: 1 << bits))
def test_spans_hold_at_least_one_chunk_and_waste_at_most_half(payload: int, slab: int) -> None:
    class_bytes = class_size(payload)
    size = span_slabs(class_bytes, slab) * slab
    assert size >= class_bytes
    assert size % class_bytes <= size / 2


def test_payload_larger_than_the_arena_never_fits() -> None:
    allocator = SlabAllocator(CAPACITY, RECORDS)
    assert not allocator.fits(CAPACITY + 1)
    assert allocator.allocate(CAPACITY + 1) is None
    assert allocator.fits(CAPACITY)


def test_records_running_out_is_the_same_as_no_room() -> None:
    allocator = SlabAllocator(CAPACITY, 2)
    first = allocator.allocate(4096)
    assert first is not None
    assert allocator.allocate(4096) is not None
    assert allocator.allocate(4096) is None
    allocator.free(first)
    assert allocator.allocate(4096) is not None


@pytest.mark.parametrize(("offset", "payload"), [(-4096, 4096), (100, 4096), (CAPACITY, 4096), (0, 1 << 40)])
def test_records_that_fit_no_chunk_are_not_adopted(offset: int, payload: int) -> None:
    assert SlabAllocator(CAPACITY, RECORDS).adopt(0, offset, payload) is None


def test_two_classes_share_one_arena() -> None:
    allocator = SlabAllocator(CAPACITY, RECORDS)
    small = [allocator.allocate(64 << 10) for _ in range(64)]
    large = [allocator.allocate(2 << 20) for _ in range(30)]
    assert None not in small
    assert None not in large
    for chunk in small:
        assert chunk is not None
        allocator.free(chunk)
    assert allocator.allocate(2 << 20) is not None
