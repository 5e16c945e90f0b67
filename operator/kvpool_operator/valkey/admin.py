"""Talking to one node of the managed Valkey, in one round trip.

Owns the connection and the translation of valkey-py's errors. Invariant: no call blocks longer than a connect and a few reads
of `timeout_seconds` each, and a node that does not answer is a value (`SeenPod.problem`).
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import valkey
from valkey.exceptions import AuthenticationError, NoPermissionError, ResponseError, ValkeyError

from kvpool_core.errors import KVPoolError
from kvpool_operator.valkey.acl import OPERATOR
from kvpool_operator.valkey.commands import Arguments, Command, Pod
from kvpool_operator.valkey.members import SeenPod, Waiting
from kvpool_operator.valkey.view import NodeView, ValkeyReplyError, parse_view

UNREACHABLE, UNAUTHENTICATED, REFUSED = "ShardUnreachable", "ValkeyUnauthenticated", "ShardRefuses"
HARMLESS = ("unknown node", "handshake already in progress")
"""Parts of error replies that say: this is done already."""
_LOOK: tuple[Arguments, ...] = (
    ("CLUSTER", "NODES"),
    ("CLUSTER", "INFO"),
    ("INFO", "server", "memory"),
    ("CLUSTER", "GETSLOTMIGRATIONS"),
    ("TIME",),
)

Reply = bytes | int | list["Reply"] | None


class ValkeyUnreachableError(KVPoolError):
    """A node cannot be connected to, or stopped answering."""


class ValkeyUnauthenticatedError(KVPoolError):
    """A node refuses the password, or the user may not do what is needed."""


class ValkeyRefusedError(KVPoolError):
    """A node answered a command with an error."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to log in, and how long to wait."""

    password: str
    timeout_seconds: float = 2.0
    username: str = OPERATOR


def look(pod: Pod, access: Access) -> SeenPod:
    """What a pod's node says; never raises."""
    if not pod.host:
        return SeenPod(pod, None, Waiting(UNREACHABLE, f"{pod.name} has no address yet"))
    try:
        return SeenPod(pod, fetch_view(pod, access))
    except ValkeyUnauthenticatedError as error:
        return SeenPod(pod, None, Waiting(UNAUTHENTICATED, str(error)))
    except ValkeyUnreachableError as error:
        return SeenPod(pod, None, Waiting(UNREACHABLE, str(error)))
    except (ValkeyRefusedError, ValkeyReplyError) as error:
        return SeenPod(pod, None, Waiting(REFUSED, str(error)))


def fetch_view(pod: Pod, access: Access) -> NodeView:
    """What a pod's node says; raises the errors above and ValkeyReplyError."""
    replies = _exchange(pod, access, _LOOK)
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise _translated(reply, pod)
    nodes, cluster_info, info, migrations, clock = cast(Sequence[Reply], replies)
    try:
        seconds, microseconds = (int(part) for part in cast(list[bytes], clock))
        return parse_view(
            nodes=cast(bytes, nodes).decode(),
            cluster_info=cast(bytes, cluster_info).decode(),
            info=cast(bytes, info).decode(),
            migrations=[_as_map(job) for job in cast(list[list[Reply]], migrations)],
            time_ms=seconds * 1000 + microseconds // 1000,
        )
    except (TypeError, AttributeError, ValueError) as error:
        raise ValkeyReplyError(f"{pod.name} at {pod.host} does not answer as Valkey does: {error}") from error


def execute(command: Command, access: Access) -> None:
    """Have a pod's node carry out a command; raises the errors above."""
    for reply in _exchange(command.pod, access, command.wire()):
        if isinstance(reply, ResponseError) and not any(text in str(reply).lower() for text in HARMLESS):
            raise _translated(reply, command.pod)


def _exchange(pod: Pod, access: Access, commands: Sequence[Arguments]) -> list[Reply | ResponseError]:
    with _connected(pod, access) as connection:
        connection.send_packed_command(connection.pack_commands(commands))
        return [_read(connection) for _ in commands]


@contextlib.contextmanager
def _connected(pod: Pod, access: Access) -> Iterator[valkey.Connection]:
    connection = valkey.Connection(
        host=pod.host,
        port=pod.port,
        username=access.username,
        password=access.password,
        socket_timeout=access.timeout_seconds,
        socket_connect_timeout=access.timeout_seconds,
        protocol=2,
        lib_name="kvpool-operator",
        lib_version=None,
    )
    try:
        connection.connect()
        yield connection
    except (ValkeyError, OSError) as error:
        raise _translated(error, pod) from error
    finally:
        connection.disconnect()


def _read(connection: valkey.Connection) -> Reply | ResponseError:
    try:
        return cast(Reply, connection.read_response())
    except ResponseError as error:
        return error


def _translated(error: Exception, pod: Pod) -> KVPoolError:
    where = f"{pod.name} at {pod.host}:{pod.port}"
    if isinstance(error, NoPermissionError):
        return ValkeyUnauthenticatedError(f"{where} does not let the operator do its work: {error}")
    if isinstance(error, AuthenticationError):
        return ValkeyUnauthenticatedError(
            f"{where} refuses the operator's password; delete the pod to give it the present one"
        )
    if isinstance(error, ResponseError):
        return ValkeyRefusedError(f"{where} answers with an error: {error}")
    return ValkeyUnreachableError(f"{where} does not answer: {error}")


def _as_map(pairs: Sequence[Reply]) -> dict[str, str]:
    texts = [part.decode() if isinstance(part, bytes) else str(part) for part in pairs]
    return dict(zip(texts[::2], texts[1::2], strict=True))
