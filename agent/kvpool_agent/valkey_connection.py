"""Connections to one Valkey node: pools, logins, deadlines, and what a failure means.

Translates valkey-py's exceptions into `Failure`. Invariant: no call on a connection outlasts its deadline, however
slowly bytes trickle in.
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import enum
import math
import socket
import time
from pathlib import Path
from typing import Any

import valkey
from valkey.credentials import CredentialProvider
from valkey.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
    ValkeyError,
)

from kvpool_agent.valkey_parser import LargeValueParser
from kvpool_agent.valkey_settings import ValkeySettings


class Failure(enum.Enum):
    """Why an operation failed; the values are metric labels and words in log lines."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    UNAUTHENTICATED = "unauthenticated"
    CLUSTER_DOWN = "cluster_down"
    RESHARDING = "resharding"
    """The slot is being moved, and no node would answer for the key: not found out, and no fault of any shard."""
    FULL = "full"
    READ_ONLY_REPLICA = "read_only_replica"
    FORBIDDEN = "forbidden"
    REFUSED = "refused"


_RESPONSES: tuple[tuple[type[ValkeyError], Failure], ...] = (
    (AuthenticationError, Failure.UNAUTHENTICATED),
    (valkey.TimeoutError, Failure.TIMEOUT),
    (valkey.ConnectionError, Failure.CONNECTION),
    (ClusterDownError, Failure.CLUSTER_DOWN),
    (TryAgainError, Failure.RESHARDING),
    (AskError, Failure.RESHARDING),
    (OutOfMemoryError, Failure.FULL),
    (ReadOnlyError, Failure.READ_ONLY_REPLICA),
    (NoPermissionError, Failure.FORBIDDEN),
    (ResponseError, Failure.REFUSED),
)


def failure_of(error: BaseException) -> Failure:
    """The meaning of what valkey-py or the operating system raised."""
    for kind, failure in _RESPONSES:
        if isinstance(error, kind):
            return failure
    return Failure.TIMEOUT if isinstance(error, TimeoutError) else Failure.CONNECTION


class DeadlineSocket(socket.socket):
    """A socket whose receiving and sending together end at `deadline` (monotonic seconds).

    A plain socket's timeout starts anew with every piece that is received.
    """

    deadline: float = math.inf

    def recv_into(self, *args: Any) -> int:
        """As socket.recv_into, within the deadline."""
        self._arm()
        return super().recv_into(*args)

    def recv(self, *args: Any) -> bytes:
        """As socket.recv, within the deadline."""
        self._arm()
        return super().recv(*args)

    def sendall(self, *args: Any) -> None:
        """As socket.sendall, within the deadline."""
        self._arm()
        super().sendall(*args)

    def _arm(self) -> None:
        if self.gettimeout() == 0:  # valkey-py looks whether an idle connection has data
            return
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("deadline exceeded")
        self.settimeout(remaining)


class DeadlineConnection(valkey.Connection):
    """valkey-py's connection on a DeadlineSocket.

    The deadline of login, and of each command of valkey-py's own (it asks for the topology), is the socket timeout.
    """

    _is_limited = False

    def limit(self, deadline: float) -> None:
        """Set the deadline (monotonic seconds) of what follows, until `unlimit`."""
        self._is_limited = True
        self._set(deadline)

    def unlimit(self) -> None:
        """The deadline was for what is over: whoever uses the connection next has its own."""
        self._is_limited = False

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """As valkey.Connection's."""
        if not self._is_limited:
            self._set(time.monotonic() + (self.socket_timeout or math.inf))
        super().send_packed_command(command, check_health)

    def _set(self, deadline: float) -> None:
        if isinstance(self._sock, DeadlineSocket):
            self._sock.deadline = deadline

    def _connect(self) -> DeadlineSocket:
        plain: socket.socket = super()._connect()
        limited = DeadlineSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        limited.settimeout(self.socket_timeout)
        limited.deadline = time.monotonic() + (self.socket_timeout or math.inf)
        return limited


class CredentialFiles(CredentialProvider):
    """Reads user and password for every new connection, so that rotated ones are taken up without a restart."""

    def __init__(self, password: Path, *, username: str | None, username_file: Path | None) -> None:
        self._password = password
        self._username = username
        self._username_file = username_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """(password,) or (user, password) as valkey-py wants them; AuthenticationError when a file cannot be read."""
        password = _read_credential(self._password, "password")
        username = self._username or self._read_username()
        return (username, password) if username else (password,)

    def _read_username(self) -> str:
        """A Secret may hold a password alone: that is the default user's."""
        if self._username_file is None or not self._username_file.exists():
            return ""
        return _read_credential(self._username_file, "username")


def _read_credential(path: Path, what: str) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthenticationError(f"{what} file {path} cannot be read: {type(error).__name__}") from None


def connection_arguments(settings: ValkeySettings) -> dict[str, Any]:
    """Arguments of valkey-py's ConnectionPool, without host and port."""
    arguments: dict[str, Any] = {
        "connection_class": DeadlineConnection,
        "parser_class": LargeValueParser,
        "socket_timeout": settings.base_timeout_seconds,
        "socket_connect_timeout": settings.connect_timeout_seconds,
        "socket_keepalive": True,
        "protocol": 2,
        "lib_name": "kvpool",
        "lib_version": None,
    }
    if settings.password_file is not None:
        username_file = Path(settings.username_file) if settings.username_file is not None else None
        arguments["credential_provider"] = CredentialFiles(
            Path(settings.password_file), username=settings.username, username_file=username_file
        )
    return arguments


def open_pool(settings: ValkeySettings, host: str, port: int) -> valkey.ConnectionPool:
    """A pool of connections to one node; connects when first used."""
    return valkey.ConnectionPool(host=host, port=port, **connection_arguments(settings))
