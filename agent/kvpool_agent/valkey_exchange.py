"""Pipelined requests to one Valkey node over one connection, and the following of redirects.

Owns the encoding of requests with large values in pieces (nothing is joined or copied). Invariant: a connection goes
back to its pool only when every reply was read; otherwise it is closed.
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import valkey
from valkey.exceptions import AskError, MovedError, ResponseError, ValkeyClusterException

from kvpool_agent.valkey_connection import DeadlineConnection
from kvpool_agent.valkey_topology import Topology

Argument = bytes | tuple[bytes | memoryview, ...]
"""One argument of a command; a tuple is one argument in pieces."""
Request = tuple[Argument, ...]
Reply = bytes | bytearray | int | None | list[object] | ResponseError
EXCHANGE_ERRORS = (valkey.ValkeyError, ValkeyClusterException, OSError, LookupError)
"""What valkey-py, the network and a stale topology raise."""
MAX_REDIRECTS = 3
JOIN_BELOW_BYTES = 4096


def encode_requests(requests: Sequence[Request]) -> list[bytes | memoryview]:
    """The requests in Valkey's protocol, as pieces to send in order; large pieces stay what they are."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for request in requests:
        small.append(b"*%d\r\n" % len(request))
        for argument in request:
            parts = argument if isinstance(argument, tuple) else (argument,)
            small.append(b"$%d\r\n" % sum(map(len, parts)))
            for part in parts:
                if len(part) < JOIN_BELOW_BYTES:
                    small.append(part)
                else:
                    pieces += (b"".join(small), part)
                    small = []
            small.append(b"\r\n")
    return [*pieces, b"".join(small)]


def exchange(pool: valkey.ConnectionPool, requests: Sequence[Request], *, deadline: float) -> Iterator[Reply]:
    """Send all requests, yield their replies in order; errors of single commands are yielded, others are raised."""
    connection = cast(DeadlineConnection, pool.get_connection("kvpool"))
    try:
        connection.limit(deadline)
        connection.send_packed_command(encode_requests(requests))
        for _ in requests:
            yield _read_reply(connection)
    except BaseException:
        connection.disconnect()
        raise
    finally:
        connection.unlimit()
        pool.release(connection)


class RedirectedError(Exception):
    """The node that a request was sent on to failed, by its cause; the shard that was asked answered."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target


def exchange_following(
    topology: Topology, shard: str, requests: Sequence[Request], *, deadline: float
) -> Iterator[tuple[int, Reply]]:
    """Like `exchange` on a shard of a topology, yielding (index of the request, reply), redirected ones last.

    While a slot is being moved a command with several keys is refused (TRYAGAIN): give each request one key.
    Raises what valkey-py raises, and LookupError when the topology does not know the shard (any more); RedirectedError
    from one of these when it was another node than the shard.
    """
    pending = [(index, shard, False) for index in range(len(requests))]
    for attempt in range(MAX_REDIRECTS + 1):
        redirected: list[tuple[int, str, bool]] = []
        for target, is_asking, indexes in _grouped(pending):
            replies = _exchange_some(topology, target, [requests[i] for i in indexes], is_asking, deadline)
            for index, reply in zip(indexes, _blaming(shard, target, replies), strict=True):
                if isinstance(reply, AskError) and attempt < MAX_REDIRECTS:
                    redirected.append((index, topology.redirect(reply), not isinstance(reply, MovedError)))
                else:
                    yield index, reply
        pending = redirected


def _blaming(shard: str, target: str, replies: Iterator[Reply]) -> Iterator[Reply]:
    try:
        yield from replies
    except EXCHANGE_ERRORS as error:
        if target == shard:
            raise
        raise RedirectedError(target) from error


def _grouped(pending: list[tuple[int, str, bool]]) -> Iterator[tuple[str, bool, list[int]]]:
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, shard, is_asking in pending:
        groups.setdefault((shard, is_asking), []).append(index)
    for (shard, is_asking), indexes in groups.items():
        yield shard, is_asking, indexes


def _exchange_some(
    topology: Topology, shard: str, requests: list[Request], is_asking: bool, deadline: float
) -> Iterator[Reply]:
    pool = topology.pool(shard)
    if pool is None:
        raise LookupError(f"{shard} is not a node of the cluster as it was last seen")
    if not is_asking:
        yield from exchange(pool, requests, deadline=deadline)
        return
    asked: list[Request] = [part for request in requests for part in ((b"ASKING",), request)]
    for number, reply in enumerate(exchange(pool, asked, deadline=deadline)):
        if number % 2:
            yield reply


def _read_reply(connection: DeadlineConnection) -> Reply:
    try:
        return cast(Reply, connection.read_response())
    except ResponseError as error:
        return error
