"""The slot table's layout: what is written is read, at the places that readers of the generation rely on."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_core import slot_table
from kvpool_core.slot_table import SlotRecord, TableHeader

SLOTS = 5
U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
EMPTY = SlotRecord(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, bytes(16), bytes(32), bytes(32))
KEY = st.binary(min_size=32, max_size=32)
RECORDS = st.builds(
    SlotRecord,
    generation=U64,
    lease_until_ns=U64,
    payload_offset=U64,
    recency=U64,
    checksum=U64,
    owner=U64,
    payload_bytes=U64,
    group=U32,
    position=U32,
    state=st.integers(0, 3),
    flags=st.integers(0, 7),
    domain=st.binary(min_size=16, max_size=16),
    block_hash=KEY,
    parent_hash=KEY,
)


def new_table() -> memoryview:
    table = memoryview(bytearray(slot_table.table_bytes(SLOTS)))
    slot_table.pack_header(table, TableHeader(b"a" * 16, b"b" * 16, SLOTS, 1 << 20))
    return table


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), RECORDS), max_size=20))
def test_each_slot_holds_the_last_record_written_to_it(writes: list[tuple[int, SlotRecord]]) -> None:
    table, model = new_table(), {}
    for slot, record in writes:
        slot_table.pack_record(table, slot, record)
        model[slot] = record
    for slot, record in model.items():
        assert slot_table.unpack_record(table, slot) == record
        assert slot_table.read_state(table, slot) == (record.generation, record.state)
    assert slot_table.unpack_header(table) == TableHeader(b"a" * 16, b"b" * 16, SLOTS, 1 << 20)


def test_header_of_another_layout_or_a_short_table_is_refused() -> None:
    table = new_table()
    assert slot_table.unpack_header(table[: slot_table.HEADER_BYTES - 1]) is None
    assert slot_table.unpack_header(table[: slot_table.HEADER_BYTES]) is None
    struct.pack_into("<I", table, 8, slot_table.LAYOUT_VERSION + 1)
    assert slot_table.unpack_header(table) is None


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SlotRecord)])
def test_changing_one_field_changes_nothing_else(field: str) -> None:
    table = new_table()
    before = SlotRecord(1, 2, 3, 4, 5, 6, 7, 8, 9, slot_table.READY, 1, b"d" * 16, b"h" * 32, b"p" * 32)
    value = getattr(before, field)
    changed = dataclasses.replace(before, **{field: value + 1 if isinstance(value, int) else bytes(len(value))})  # type: ignore[arg-type]
    slot_table.pack_record(table, 3, before)
    slot_table.pack_record(table, 3, changed)
    assert slot_table.unpack_record(table, 3) == changed
    assert slot_table.unpack_record(table, 2) == EMPTY
