"""The slot table as the agent writes it, engines read it and a successor takes it over."""

from __future__ import annotations

import os
import struct
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.arena import Arena, ArenaFds, records_for
from kvpool_agent.memfd import create_payload, create_table, seal_payload
from kvpool_agent.slot_writer import SlotWriter
from kvpool_agent.takeover import AGENT_OWNER, decide, read_old_table
from kvpool_core.errors import ArenaError
from kvpool_core.slot_table import (
    CHECKSUM_VALID,
    FREE,
    HEADER_BYTES,
    LAYOUT_VERSION,
    QUARANTINED,
    READY,
    RECORD_BYTES,
    UNVERIFIED,
    WRITING,
    SlotRecord,
    TableHeader,
    pack_header,
    pack_record,
    read_state,
    table_bytes,
    unpack_header,
    unpack_record,
)

CAPACITY = 1 << 20
ARENA_ID = b"a" * 16

_u64 = st.integers(0, 2**64 - 1)
_u32 = st.integers(0, 2**32 - 1)
_byte = st.integers(0, 255)
_records = st.builds(
    SlotRecord,
    _u64, _u64, _u64, _u64, _u64, _u64, _u64, _u32, _u32, _byte, _byte,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
)  # fmt: skip


@given(st.lists(_records, min_size=1, max_size=5))
def test_records_read_back_as_written_and_do_not_touch_each_other(records: list[SlotRecord]) -> None:
    table = memoryview(bytearray(table_bytes(len(records))))
    for index, record in enumerate(records):
        pack_record(table, index, record)
    assert [unpack_record(table, index) for index in range(len(records))] == records
    assert [read_state(table, index) for index in range(len(records))] == [
        (record.generation, record.state) for record in records
    ]


def test_header_of_another_layout_or_a_short_table_is_refused() -> None:
    table = memoryview(bytearray(table_bytes(5)))
    pack_header(table, TableHeader(ARENA_ID, b"b" * 16, 5, CAPACITY))
    assert unpack_header(table) == TableHeader(ARENA_ID, b"b" * 16, 5, CAPACITY)
    assert unpack_header(table[: HEADER_BYTES - 1]) is None
    assert unpack_header(table[:HEADER_BYTES]) is None
    struct.pack_into("<I", table, 8, LAYOUT_VERSION + 1)
    assert unpack_header(table) is None


@pytest.mark.parametrize("field", [field.name for field in fields(SlotRecord)])
def test_changing_one_field_changes_nothing_else(field: str) -> None:
    table = memoryview(bytearray(table_bytes(2)))
    before = SlotRecord(1, 2, 3, 4, 5, 6, 7, 8, 9, READY, 1, b"d" * 16, b"h" * 32, b"p" * 32)
    value = getattr(before, field)
    changed = replace(before, **{field: value + 1 if isinstance(value, int) else bytes(len(value))})  # type: ignore[arg-type]
    pack_record(table, 1, before)
    pack_record(table, 1, changed)
    assert unpack_record(table, 1) == changed
    assert not any(table[HEADER_BYTES : HEADER_BYTES + RECORD_BYTES])


@given(_records, _u64, _u64, _u64, _u64, _byte, _byte)
def test_single_fields_are_written_where_records_have_them(
    record: SlotRecord, generation: int, lease: int, recency: int, checksum: int, state: int, flags: int
) -> None:
    table = memoryview(bytearray(table_bytes(2)))
    writer = SlotWriter(table)
    writer.record(1, record)
    writer.generation(1, generation)
    writer.lease(1, lease)
    writer.recency(1, recency)
    writer.checksum(1, checksum, flags)
    writer.state(1, state)
    assert unpack_record(table, 1) == replace(
        record,
        generation=generation,
        lease_until_ns=lease,
        recency=recency,
        checksum=checksum,
        state=state,
        flags=flags,
    )
    assert writer.read_generation(1) == generation
    assert bytes(table[HEADER_BYTES : HEADER_BYTES + RECORD_BYTES]) == bytes(RECORD_BYTES)


@given(st.binary(max_size=200), st.integers(0, 2 * HEADER_BYTES))
def test_any_bytes_are_a_header_that_fits_or_none(start: bytes, size: int) -> None:
    table = bytearray(max(size, len(start)))
    table[: len(start)] = start
    header = unpack_header(memoryview(table))
    assert header is None or table_bytes(header.records) <= len(table)


@given(st.lists(_records, max_size=8), st.integers(0, 2**63))
def test_nothing_unproven_survives_a_takeover(records: list[SlotRecord], now: int) -> None:
    takeover = decide(iter(enumerate(records)), now)
    assert takeover.generations == {index: record.generation for index, record in enumerate(records)}
    for index, record in takeover.ready:
        assert records[index].state == READY
        assert records[index].flags & CHECKSUM_VALID
        assert record.flags & UNVERIFIED
    held = {index for index, record in enumerate(records) if record.lease_until_ns > now and record.state != FREE}
    ready = {index for index, _record in takeover.ready}
    assert {index for index, _record in takeover.quarantined} == held - ready
    assert all(record.state == QUARANTINED for _index, record in takeover.quarantined)


def _old_table(records: list[SlotRecord], *, arena_id: bytes = ARENA_ID, sealed: bool = True) -> int:
    fd = create_table(table_bytes(16))
    buffer = bytearray(table_bytes(16))
    header = TableHeader(arena_id=arena_id, boot_id=bytes(16), records=16, capacity_bytes=CAPACITY)
    pack_header(memoryview(buffer), header)
    for index, record in enumerate(records):
        pack_record(memoryview(buffer), index, record)
    os.pwrite(fd, buffer, 0)
    if sealed:
        seal_payload(fd)
    return fd


RECORD = SlotRecord(5, 0, 0, 1, 9, AGENT_OWNER, 4096, 0, 0, WRITING, 0, bytes(16), bytes(32), bytes(32))


def test_former_table_is_read_up_to_the_first_slot_never_used() -> None:
    fd = _old_table([RECORD, replace(RECORD, generation=7)])
    records = read_old_table(fd, ARENA_ID)
    assert records is not None
    assert [(index, record.generation) for index, record in records] == [(0, 5), (1, 7)]
    os.close(fd)


@pytest.mark.parametrize("fault", ["other arena", "unsealed", "no table"])
def test_table_that_is_not_of_this_arena_is_not_taken_over(fault: str) -> None:
    fd = _old_table([RECORD], arena_id=b"b" * 16 if fault == "other arena" else ARENA_ID, sealed=fault != "unsealed")
    if fault == "no table":
        os.close(fd)
        fd = create_table(HEADER_BYTES)
        seal_payload(fd)
    assert read_old_table(fd, ARENA_ID) is None
    os.close(fd)


def test_slot_the_agent_itself_was_filling_is_free_after_a_takeover() -> None:
    takeover = decide(iter([(0, RECORD)]), 10)
    assert (takeover.ready, takeover.quarantined, takeover.dropped) == ([], [], 0)


def test_engines_can_read_the_table_but_neither_write_nor_shrink_it() -> None:
    payload = create_payload(CAPACITY, 0)
    seal_payload(payload)
    arena = Arena(ArenaFds(ARENA_ID, CAPACITY, 0, payload, None), boot_id=b"b" * 16)
    assert arena.records == records_for(CAPACITY) == 64
    SlotWriter(arena.table).record(3, RECORD)
    assert os.pread(arena.table_fd, 8, HEADER_BYTES + 3 * RECORD_BYTES) == (5).to_bytes(8, "little")
    with pytest.raises(PermissionError):
        os.pwrite(arena.table_fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.table_fd, 0)
    arena.block(4096, 4096)[:5] = b"hello"
    assert os.pread(payload, 5, 4096) == b"hello"


def test_payload_of_another_size_or_unsealed_is_no_arena() -> None:
    payload = create_payload(CAPACITY, 0)
    with pytest.raises(ArenaError, match="not sealed"):
        Arena(ArenaFds(ARENA_ID, CAPACITY, 0, payload, None), boot_id=bytes(16))
    seal_payload(payload)
    with pytest.raises(ArenaError, match="bytes, not"):
        Arena(ArenaFds(ARENA_ID, CAPACITY * 2, 0, payload, None), boot_id=bytes(16))
    os.close(payload)
