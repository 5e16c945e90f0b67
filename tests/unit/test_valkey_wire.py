"""What is sent to and parsed from a Valkey connection, and its deadline. Socket pairs, no network."""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest
import valkey
from hypothesis import given
from hypothesis import strategies as st
from valkey.exceptions import InvalidResponse, MovedError, ResponseError

from kvpool_agent.valkey_connection import DeadlineSocket, Failure, failure_of
from kvpool_agent.valkey_exchange import Request, encode_requests
from kvpool_agent.valkey_parser import LargeValueParser, Parsed
from kvpool_agent.valkey_supervisor import WITHDRAW_SECONDS, Withdrawal, judge

SIMPLE = st.binary(max_size=40).filter(lambda text: b"\r" not in text and b"\n" not in text)
SCALARS = st.one_of(st.none(), st.integers(-(2**40), 2**40), st.binary(max_size=300))
REPLIES = st.recursive(SCALARS, lambda children: st.lists(children, max_size=4), max_leaves=8)


class Wire:
    """A parser that reads from one end of a socket pair."""

    def __init__(self) -> None:
        self.near, self._sock = socket.socketpair()
        self._sock.settimeout(5)
        self.parser = LargeValueParser(socket_read_size=65536)
        self.parser.on_connect(self)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self._sock.close()

    def parse(self, data: bytes, *, cuts: list[int], replies: int = 1) -> list[Parsed]:
        sender = threading.Thread(target=self._send, args=(data, cuts))
        sender.start()
        try:
            return [self.parser.read_response() for _ in range(replies)]
        finally:
            sender.join()

    def _send(self, data: bytes, cuts: list[int]) -> None:
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for start, end in itertools.pairwise(edges):
            self.near.sendall(data[start:end])


def resp(value: object) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    assert isinstance(value, list)
    return b"*%d\r\n" % len(value) + b"".join(map(resp, value))


@given(st.lists(REPLIES, min_size=1, max_size=4), st.lists(st.integers(0, 10_000), max_size=5))
def test_replies_are_parsed_however_the_stream_is_cut(values: list[object], cuts: list[int]) -> None:
    with Wire() as wire:
        assert wire.parse(b"".join(map(resp, values)), cuts=cuts, replies=len(values)) == values


@given(SIMPLE)
def test_simple_string_is_parsed(text: bytes) -> None:
    with Wire() as wire:
        assert wire.parse(b"+" + text + b"\r\n", cuts=[]) == [text]


def test_large_value_and_what_follows_are_parsed() -> None:
    value = bytes(range(256)) * 4096
    with Wire() as wire:
        got = wire.parse(resp(value) + b":7\r\n", cuts=[100, 500_000], replies=2)
    assert got == [value, 7]


def test_error_replies_have_valkey_classes() -> None:
    with Wire() as wire:
        moved, plain = wire.parse(b"-MOVED 5 10.0.0.1:7000\r\n-ERR no\r\n", cuts=[], replies=2)
    assert isinstance(moved, MovedError)
    assert (moved.slot_id, moved.host, moved.port) == (5, "10.0.0.1", 7000)
    assert isinstance(plain, ResponseError)


@pytest.mark.parametrize(
    "data",
    [
        b"!7\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"$abc\r\n",
        b":\r\n",
        b"$99999999999999\r\n",
        b"*99999999999999\r\n",
        b"*1\r\n" * 5000,
        b"+" + b"x" * 100_000,
    ],
)
def test_foreign_protocol_is_an_error(data: bytes) -> None:
    with Wire() as wire, pytest.raises(InvalidResponse):
        wire.parse(data, cuts=[])


@pytest.mark.parametrize("data", [b"", b"$10\r\n123", b"$5000000\r\n123", b"*2\r\n:1\r\n", b"+O"])
def test_closed_stream_is_a_connection_error(data: bytes) -> None:
    with Wire() as wire:
        wire.near.sendall(data)
        wire.near.shutdown(socket.SHUT_WR)
        with pytest.raises(valkey.ConnectionError):
            wire.parser.read_response()


def test_idle_connection_shows_whether_it_was_closed() -> None:
    with Wire() as wire:
        assert not wire.parser.can_read(0)
        wire.near.close()
        assert wire.parser.can_read(0)


ARGUMENTS = st.one_of(
    st.binary(max_size=60), st.lists(st.binary(max_size=10_000), min_size=1, max_size=3).map(lambda parts: tuple(parts))
)


@given(st.lists(st.lists(ARGUMENTS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4))
def test_requests_are_encoded_as_arrays_of_bulk_strings(requests: list[Request]) -> None:
    joined = [[b"".join(part) if isinstance(part, tuple) else part for part in request] for request in requests]
    assert b"".join(encode_requests(requests)) == b"".join(resp(list(request)) for request in joined)


def test_large_pieces_are_sent_without_a_copy() -> None:
    payload = memoryview(bytearray(100_000))
    assert any(piece is payload for piece in encode_requests([(b"SET", b"k", (b"header", payload))]))


def receive_for_ever(source: socket.socket) -> None:
    while True:
        source.recv(1)


def test_trickling_bytes_do_not_outlast_the_deadline() -> None:
    near, far = socket.socketpair()
    limited = DeadlineSocket(far.family, far.type, far.proto, fileno=far.detach())
    limited.settimeout(10)
    limited.deadline = time.monotonic() + 0.2
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.01):
            near.sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            receive_for_ever(limited)
    finally:
        stop.set()
        sender.join()
        near.close()
        limited.close()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (valkey.TimeoutError("t"), Failure.TIMEOUT),
        (TimeoutError("t"), Failure.TIMEOUT),
        (valkey.ConnectionError("c"), Failure.CONNECTION),
        (valkey.BusyLoadingError("b"), Failure.CONNECTION),
        (valkey.AuthenticationError("a"), Failure.UNAUTHENTICATED),
        (valkey.OutOfMemoryError("o"), Failure.FULL),
        (valkey.ReadOnlyError("r"), Failure.READ_ONLY_REPLICA),
        (valkey.exceptions.TryAgainError("t"), Failure.RESHARDING),
        (MovedError("5 10.0.0.1:7000"), Failure.RESHARDING),
        (ResponseError("r"), Failure.REFUSED),
        (OSError("o"), Failure.CONNECTION),
    ],
)
def test_errors_have_one_meaning(error: Exception, failure: Failure) -> None:
    assert failure_of(error) is failure


@pytest.mark.parametrize(
    ("is_found", "connect_failure", "shards", "state"),
    [
        (False, None, [], "connecting"),
        (False, Failure.CONNECTION, [], "unreachable"),
        (False, Failure.UNAUTHENTICATED, [], "unauthenticated"),
        (True, None, [None, None], "connected"),
        (True, None, [None, Failure.TIMEOUT], "degraded"),
        (True, None, [Failure.CONNECTION, Failure.TIMEOUT], "unreachable"),
        (True, None, [Failure.UNAUTHENTICATED], "unauthenticated"),
    ],
)
def test_state_of_the_tier(
    is_found: bool, connect_failure: Failure | None, shards: list[Failure | None], state: str
) -> None:
    assert judge(is_found=is_found, connect_failure=connect_failure, shards=shards).state == state


def test_hints_are_withdrawn_once_for_each_time_that_valkey_is_of_no_use_for_long() -> None:
    withdrawal = Withdrawal(100.0)
    long = WITHDRAW_SECONDS
    looks = [(False, 99 + long), (False, 101 + long), (False, 200.0), (True, 201.0), (False, 202.0), (False, 300.0)]
    assert [withdrawal.is_due(is_useful=is_useful, now=now) for is_useful, now in looks] == [
        False, True, False, False, False, True,
    ]  # fmt: skip
