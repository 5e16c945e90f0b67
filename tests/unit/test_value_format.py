"""The format of values in Valkey: what was written is read back, anything else is refused."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st
from redis.crc import key_slot

from kvpool_agent.valkey_keys import BlockKey, part_name, slot_of
from kvpool_agent.valkey_value import ALLOCATOR_SLACK_BYTES, HEADER_BYTES, assemble, build_headers, part_sizes
from kvpool_core.errors import ValueFormatError

KIB = 1024
MIB = 1024 * KIB
KEYS = st.builds(
    BlockKey,
    domain=st.binary(min_size=16, max_size=16),
    group=st.integers(0, 2**32 - 1),
    block_hash=st.binary(min_size=32, max_size=32),
)
KEY = BlockKey(b"d" * 16, 3, bytes(range(32)))


def values_of(key: BlockKey, payload: bytes) -> list[bytes]:
    values, offset = [], 0
    for header, size in zip(build_headers(key, memoryview(payload)), part_sizes(len(payload)), strict=True):
        values.append(header + payload[offset : offset + size])
        offset += size
    return values


def test_payload_that_changed_gets_no_header() -> None:
    payload = bytearray(b"x" * 100)
    checksum = xxhash.xxh3_64_intdigest(payload)
    assert build_headers(KEY, memoryview(payload), checksum=checksum) == build_headers(KEY, memoryview(payload))
    payload[50] ^= 1
    with pytest.raises(ValueFormatError, match="changed"):
        build_headers(KEY, memoryview(payload), checksum=checksum)


def jemalloc_classes(limit: int) -> list[int]:
    """Size classes as jemalloc's manual lists them: 16-byte steps to 128, then four per doubling."""
    classes = list(range(16, 129, 16))
    base = 128
    while classes[-1] < limit:
        classes += [base + base // 4 * quarter for quarter in (1, 2, 3, 4)]
        base *= 2
    return classes


CLASSES = jemalloc_classes(64 * MIB)


def allocation(size: int) -> int:
    return next(edge for edge in CLASSES if edge >= size)


@given(KEYS, st.binary(max_size=2000))
def test_payload_of_one_part_comes_back(key: BlockKey, payload: bytes) -> None:
    block = assemble(key, values_of(key, payload), len(payload))
    assert b"".join(block.pieces) == payload
    assert block.checksum == xxhash.xxh3_64_intdigest(payload)


@pytest.mark.parametrize("size", [0, 1, 16 * KIB, 64 * KIB, 80 * KIB, 100_000, MIB, 2 * MIB, 2 * MIB + 64 * KIB])
def test_payload_of_any_size_comes_back(size: int) -> None:
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    block = assemble(KEY, values_of(KEY, payload), size)
    assert b"".join(block.pieces) == payload
    assert block.checksum == xxhash.xxh3_64_intdigest(payload)


@given(KEYS, st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_byte_is_noticed(key: BlockKey, payload: bytes, data: st.DataObject) -> None:
    (value,) = values_of(key, payload)
    position = data.draw(st.integers(0, len(value) - 1))
    changed = bytearray(value)
    changed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueFormatError):
        assemble(key, [changed], len(payload))


@given(st.integers(0, 1), st.data())
def test_any_changed_byte_of_either_part_is_noticed(part: int, data: st.DataObject) -> None:
    values = [bytearray(value) for value in TWO_PARTS]
    position = data.draw(st.integers(0, len(values[part]) - 1))
    values[part][position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueFormatError):
        assemble(KEY, values, len(TWO_PART_PAYLOAD))


@given(st.binary(max_size=400), st.integers(0, 400))
def test_foreign_bytes_are_refused(value: bytes, total_bytes: int) -> None:
    with pytest.raises(ValueFormatError):
        assemble(KEY, [value], total_bytes)


@given(KEYS, KEYS, st.binary(max_size=100))
def test_value_of_another_block_is_refused(key: BlockKey, other: BlockKey, payload: bytes) -> None:
    assume(key != other)
    with pytest.raises(ValueFormatError):
        assemble(other, values_of(key, payload), len(payload))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_truncated_or_prolonged_value_is_refused(payload: bytes, data: st.DataObject) -> None:
    (value,) = values_of(KEY, payload)
    shorter = value[: data.draw(st.integers(0, len(value) - 1))]
    for wrong in (shorter, value + b"x"):
        with pytest.raises(ValueFormatError):
            assemble(KEY, [wrong], len(payload))


@given(st.binary(max_size=100), st.integers(0, 300))
def test_value_of_another_length_than_expected_is_refused(payload: bytes, expected: int) -> None:
    assume(expected != len(payload))
    with pytest.raises(ValueFormatError):
        assemble(KEY, values_of(KEY, payload), expected)


TWO_PART_PAYLOAD = bytes(range(256)) * 256
TWO_PARTS = values_of(KEY, TWO_PART_PAYLOAD)


def test_parts_of_two_stores_of_a_block_are_not_joined() -> None:
    other = values_of(KEY, TWO_PART_PAYLOAD[:-1] + b"\0")
    with pytest.raises(ValueFormatError, match="not of one block"):
        assemble(KEY, [TWO_PARTS[0], other[1]], len(TWO_PART_PAYLOAD))


def test_parts_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueFormatError):
        assemble(KEY, TWO_PARTS[::-1], len(TWO_PART_PAYLOAD))


def test_reason_names_what_is_wrong() -> None:
    payload = b"payload"
    (value,) = values_of(KEY, payload)
    reasons = {}
    for position in (0, 8, 16, 32, HEADER_BYTES):
        changed = bytearray(value)
        changed[position] ^= 1
        with pytest.raises(ValueFormatError) as caught:
            assemble(KEY, [changed], len(payload))
        reasons[position] = caught.value.reason
    assert reasons == {0: "magic", 8: "version", 16: "domain", 32: "block_hash", HEADER_BYTES: "checksum"}


@given(st.integers(0, 16 * MIB))
def test_parts_make_up_the_whole_and_cost_little_memory(total_bytes: int) -> None:
    sizes = part_sizes(total_bytes)
    assert sum(sizes) == total_bytes
    assert len(sizes) in (1, 2)
    assert all(size > 0 for size in sizes) or sizes == (0,)
    cost = sum(allocation(HEADER_BYTES + size + 16) for size in sizes)
    one = allocation(HEADER_BYTES + total_bytes + ALLOCATOR_SLACK_BYTES)  # what is kept free for the key and the object
    assert cost <= one + 256
    if total_bytes >= 64 * KIB:
        assert cost <= total_bytes * 1.13


@pytest.mark.parametrize("size", [64 * KIB, 512 * KIB, 2 * MIB])
def test_power_of_two_fills_the_class_edge_and_leaves_the_rest(size: int) -> None:
    first, rest = part_sizes(size)
    assert first + HEADER_BYTES == size - 64
    assert rest == 64 + HEADER_BYTES


@pytest.mark.parametrize("size", [100, 4 * KIB, 8 * KIB])
def test_small_payload_stays_whole(size: int) -> None:
    assert part_sizes(size) == (size,)


@given(KEYS)
def test_both_parts_lie_in_one_slot(key: BlockKey) -> None:
    assert key_slot(part_name("kvpool:ns/name:", key, 0)) == slot_of(key)
    assert key_slot(part_name("kvpool:ns/name:", key, 1)) == slot_of(key)


def test_key_is_prefix_domain_group_and_hash() -> None:
    name = part_name("kvpool:ns/chat:", KEY, 0)
    assert name == f"kvpool:ns/chat:{'64' * 16}:3:{{{bytes(range(32)).hex()}}}".encode()
    assert part_name("kvpool:ns/chat:", KEY, 1) == name + b":1"
