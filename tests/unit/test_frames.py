"""Frames against a naive model: whatever the pieces, what was sent is what comes out, and nothing is ever half a frame."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_core import wire
from kvpool_core.errors import FrameError
from kvpool_core.frames import MAX_FRAME_BYTES, FrameDecoder, encode_frame


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """The stream in pieces of the given sizes, the rest as the last piece."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@given(st.lists(st.binary(max_size=200), max_size=20), st.lists(st.integers(0, 64), max_size=60))
def test_any_cut_of_the_stream_gives_the_frames_that_were_sent(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(encode_frame(body) for body in bodies)
    decoder = FrameDecoder()
    received = [body for piece in cut(stream, sizes) for body in decoder.feed(piece)]
    assert received == bodies
    assert decoder.pending_bytes == 0


@given(st.binary(min_size=1, max_size=200), st.integers(min_value=1))
def test_truncated_stream_gives_no_frame_and_shows_what_is_pending(body: bytes, missing: int) -> None:
    stream = encode_frame(body)
    kept = stream[: len(stream) - 1 - missing % (len(stream) - 1)]
    decoder = FrameDecoder()
    assert list(decoder.feed(kept)) == []
    assert decoder.pending_bytes == len(kept)


@given(st.integers(MAX_FRAME_BYTES + 1, 2**32 - 1))
def test_length_over_the_limit_is_an_error_before_any_body_arrives(length: int) -> None:
    with pytest.raises(FrameError, match="over the limit"):
        list(FrameDecoder().feed(struct.pack("<I", length)))


def test_body_over_the_limit_cannot_be_sent() -> None:
    with pytest.raises(FrameError, match="split the batch"):
        encode_frame(bytes(MAX_FRAME_BYTES + 1))


DECODERS = (
    wire.decode_engine_message,
    wire.decode_agent_message,
    wire.decode_holder_message,
    wire.decode_stream_message,
)


@given(st.binary(max_size=300))
def test_noise_is_a_frame_error_or_a_message_and_never_anything_else(noise: bytes) -> None:
    for decode in DECODERS:
        try:
            message = decode(noise)
        except FrameError:
            continue
        assert isinstance(message, wire.Message)


@given(st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(), st.lists, max_leaves=20))
def test_other_msgpack_values_are_frame_errors(value: object) -> None:
    body = msgspec.msgpack.encode([value] if not isinstance(value, list) else value)
    for decode in DECODERS:
        with pytest.raises(FrameError):
            decode(body)


@given(
    request=st.text(max_size=40),
    domain=st.binary(min_size=16, max_size=16),
    private=st.booleans(),
    groups=st.lists(
        st.builds(
            wire.GroupKeys,
            st.integers(0, 7),
            st.lists(st.binary(min_size=32, max_size=32), max_size=8),
            st.integers(0, 8),
        ),
        max_size=3,
    ),
    rate=st.floats(0, 1e6),
)
def test_messages_survive_the_wire(
    request: str, domain: bytes, private: bool, groups: list[wire.GroupKeys], rate: float
) -> None:
    message = wire.Prefetch(7, request, domain, private, groups, rate)
    (body,) = FrameDecoder().feed(wire.encode(message))
    assert wire.decode_engine_message(body) == message


@pytest.mark.parametrize(
    ("low", "high", "chosen"),
    [(1, 1, 1), (1, 9, wire.PROTOCOL_VERSION), (wire.PROTOCOL_VERSION + 1, 99, None), (0, 0, None)],
)
def test_highest_common_version_is_chosen(low: int, high: int, chosen: int | None) -> None:
    assert wire.choose_version(low, high) == chosen
