"""The `valkey` section of the agent's configuration file.

Owns the names, defaults and limits of the shared tier's settings. Invariant: settings that passed `validate()` need no
further check anywhere in the tier.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvpool_core.errors import ConfigError

MAX_ENDPOINTS = 32
MAX_KEY_PREFIX_CHARACTERS = 64
_DEFAULT_PREFIX = re.compile(r"kvpool:[a-z0-9-]{1,63}/[a-z0-9-]{1,63}:")
"""The default of a pool with a long name is longer than what a user may write, and right all the same."""
MIN_TTL_SECONDS = 60
MAX_THREADS = 64


class ValkeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to reach the shared tier and how much it may cost. Units are in the names."""

    endpoints: list[str]
    """ "host:port" of 1 to 32 nodes; of a cluster any of them, the others are discovered."""
    topology: Literal["Auto", "Cluster", "Standalone"] = "Auto"
    """Auto asks the first node that answers."""
    key_prefix: str = ""
    """Start of every key; the agent's configuration puts in `kvpool:<namespace>/<name>:` when empty."""
    username: str | None = None
    """ACL user; absent = `default`."""
    username_file: str | None = None
    """File with the ACL user's name in place of `username`, read for every new connection; absent or empty = `default`."""
    password_file: str | None = None
    """File with the password (surrounding white space is dropped), read for every new connection, so it may change."""
    write_policy: Literal["WriteThrough", "ReadOnly"] = "WriteThrough"
    """ReadOnly never writes and never deletes."""
    ttl_seconds: int | None = None
    """Life of a value after its last store; absent = Valkey's maxmemory policy decides."""
    connect_timeout_seconds: float = 1.0
    """A TCP connect, and then the login, may each take this long: a few round trips, with room for one lost packet."""
    base_timeout_seconds: float = 1.0
    """What any operation may take before bytes are counted."""
    timeout_seconds_per_mib: float = 0.25
    """On top, per MiB moved: 4 MiB/s, below which fetching is never worth it."""
    write_queue_bytes: int = 256 * 1024 * 1024
    """Payload waiting to be written; what is beyond is dropped. It stays in the arena: the queue holds names only."""
    read_threads: int = 4
    """Threads that fetch values; as many again ask for existence."""
    write_threads: int = 2
    """Threads that store values."""
    breaker_failures: int = 3
    """Failures in a row after which a shard is left alone; a timeout or a refused login suffices by itself."""
    breaker_open_seconds: float = 2.0
    """How long a shard is left alone before it is probed, plus up to half of it at random."""

    def validate(self) -> None:
        """ConfigError naming key and remedy when a value is out of its range."""
        _check_endpoints(self.endpoints)
        _check_key_prefix(self.key_prefix)
        for key in ("username", "username_file"):
            if getattr(self, key) is not None and self.password_file is None:
                raise _error(key, "is set without valkey.password_file", "name the file with the user's password")
        if self.username is not None and self.username_file is not None:
            raise _error("username_file", "is set besides valkey.username", "keep one of them")
        if self.ttl_seconds is not None and self.ttl_seconds < MIN_TTL_SECONDS:
            raise _error("ttl_seconds", f"is {self.ttl_seconds}", f"give at least {MIN_TTL_SECONDS}, or leave it out")
        for key in ("connect_timeout_seconds", "base_timeout_seconds", "breaker_open_seconds"):
            _check_range(self, key, low=0.01, high=60.0)
        _check_range(self, "timeout_seconds_per_mib", low=0.0, high=60.0)
        _check_range(self, "write_queue_bytes", low=0, high=2**40)
        _check_range(self, "breaker_failures", low=1, high=1000)
        for key in ("read_threads", "write_threads"):
            _check_range(self, key, low=1, high=MAX_THREADS)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[ipv6]:port"; ValueError says what is wrong."""
    host, colon, port = endpoint.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("has several colons: write an IPv6 address as [address]:port")
    if not colon or not host or any(character.isspace() for character in host):
        raise ValueError("is not host:port")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError("has no port from 1 to 65535")
    return host, int(port)


def _check_endpoints(endpoints: list[str]) -> None:
    if not 1 <= len(endpoints) <= MAX_ENDPOINTS:
        raise _error("endpoints", f"has {len(endpoints)} entries", f'give 1 to {MAX_ENDPOINTS} of "host:port"')
    if len(set(endpoints)) != len(endpoints):
        raise _error("endpoints", "names an endpoint twice", "name each once")
    for endpoint in endpoints:
        try:
            parse_endpoint(endpoint)
        except ValueError as error:
            raise _error("endpoints", f"entry {endpoint!r} {error}", 'write it as "host:port"') from None


def _check_key_prefix(prefix: str) -> None:
    if len(prefix) > MAX_KEY_PREFIX_CHARACTERS and not _DEFAULT_PREFIX.fullmatch(prefix):
        raise _error("key_prefix", f"has {len(prefix)} characters", f"use at most {MAX_KEY_PREFIX_CHARACTERS}")
    if any(character in "{}" or character.isspace() or not character.isprintable() for character in prefix):
        raise _error(
            "key_prefix", "has a brace, white space or an unprintable character", "leave those out: braces pick shards"
        )


def _check_range(settings: ValkeySettings, key: str, *, low: float, high: float) -> None:
    value = getattr(settings, key)
    if not low <= value <= high:
        raise _error(key, f"is {value}", f"give a value from {low:g} to {high:g}")


def _error(key: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"valkey.{key} {problem}; {remedy}")
