"""A connection to one Valkey node, and what its failures mean.

Owns the use of valkey-py and the translation of its errors. Invariant: whatever the other side is and sends, entering and
each exchange take at most `timeout_seconds` and REPLY_MAX_BYTES, and raise only the errors below; every reply of a pipeline is
read, error replies are values.
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import valkey
from valkey.exceptions import AuthenticationError, NoPermissionError, ResponseError, ValkeyError

from kvpool_core.errors import KVPoolError
from kvpool_operator.bounded_socket import BoundedSocket
from kvpool_operator.fence import Fence, OpenFence, sending_under, write_timeout

REPLY_MAX_BYTES = 8 << 20
"""Of one exchange. The most that is wanted is CLUSTER SLOTS of a large cluster, and ten thousand keys of a SCAN."""
NO_ANSWER = (ValkeyError, OSError, ValueError, OverflowError, RecursionError)
"""What valkey-py raises when nothing comes, or something that is no reply."""
Arguments = tuple[str | int | bytes, ...]
Reply = bytes | int | list["Reply"] | ResponseError | None


class ValkeyUnreachableError(KVPoolError):
    """A node cannot be connected to, or stopped answering."""


class ValkeyUnauthenticatedError(KVPoolError):
    """A node refuses the login."""


class ValkeyForbiddenError(KVPoolError):
    """The user may not do what is needed."""


class ValkeyRefusedError(KVPoolError):
    """A node answered a command with an error."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to log in, and how long connecting with the login, and each exchange, may take. password None = no login."""

    username: str | None
    password: str | None
    timeout_seconds: float = 2.0


class Wire:
    """A context with one open connection; `name` is what errors call the node.

    fence: of one by which a leader changes something; each exchange is sent behind it (NotLeaderError).
    """

    def __init__(self, host: str, port: int, access: Access, *, name: str = "", fence: Fence | None = None) -> None:
        self._where = f"{name} at {host}:{port}" if name else f"{host}:{port}"
        self._timeout_seconds = access.timeout_seconds
        self._fence = fence or OpenFence()
        self._connection = _BoundedConnection(
            host=host,
            port=port,
            username=access.username,
            password=access.password,
            socket_timeout=access.timeout_seconds,
            socket_connect_timeout=access.timeout_seconds,
            protocol=2,
            lib_name="kvpool-operator",
            lib_version=None,
        )

    def exchange(self, commands: Sequence[Arguments]) -> list[Reply]:
        """Send all, read all; raises the errors above but for error replies, which are returned."""
        self._connection.grant(write_timeout(self._fence, self._timeout_seconds))
        try:
            with sending_under(self._fence):
                self._connection.send_packed_command(self._connection.pack_commands(commands))
            return [self._read() for _ in commands]
        except NO_ANSWER as error:
            raise self.translated(error) from error

    def ask(self, *command: str | int | bytes) -> Reply:
        """One command; an error reply is raised."""
        (reply,) = self.exchange([command])
        if isinstance(reply, ResponseError):
            raise self.translated(reply) from reply
        return reply

    def translated(self, error: Exception) -> KVPoolError:
        """valkey-py's error as ours."""
        if isinstance(error, NoPermissionError):
            return ValkeyForbiddenError(f"{self._where} does not allow a command that is needed: {error}")
        if isinstance(error, AuthenticationError):
            return ValkeyUnauthenticatedError(f"{self._where} refuses the login: {error}")
        if isinstance(error, ResponseError):
            return ValkeyRefusedError(f"{self._where} answers with an error: {error}")
        return ValkeyUnreachableError(f"{self._where} does not answer: {error}")

    def __enter__(self) -> Wire:
        try:
            self._connection.connect()
        except NO_ANSWER as error:
            self._connection.disconnect()
            raise self.translated(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.disconnect()

    def _read(self) -> Reply:
        try:
            return cast(Reply, self._connection.read_response())
        except ResponseError as error:
            return error


class _BoundedConnection(valkey.Connection):
    """valkey-py's timeout is for each read, so one byte now and then would keep it reading for ever."""

    _bounded: BoundedSocket | None = None

    def grant(self, seconds: float) -> None:
        """For what follows."""
        if self._bounded is not None:
            self._bounded.grant(deadline=time.monotonic() + seconds, max_bytes=REPLY_MAX_BYTES)

    def _connect(self) -> BoundedSocket:
        deadline = time.monotonic() + (self.socket_connect_timeout or 0.0)
        self._bounded = BoundedSocket.take_over(super()._connect())
        self._bounded.grant(deadline=deadline, max_bytes=REPLY_MAX_BYTES)
        return self._bounded
