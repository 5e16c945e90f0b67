"""Erasing one pool's keys from a Valkey that others use too.

Blocking. Invariant: no key is deleted that does not start with the prefix; below a prefix that a user chose, none that does not
have the form of our blocks' keys either, since others may have keys below it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

from valkey.crc import key_slot
from valkey.exceptions import NoPermissionError, ReadOnlyError, ResponseError

from kvpool_core.errors import ConfigError, KVPoolError
from kvpool_operator.valkey.acl import EXTERNAL_RIGHTS, escape_glob
from kvpool_operator.valkey.wire import Access, Arguments, Reply, ValkeyForbiddenError, Wire

Address = tuple[str, int]

SCAN_COUNT = 10_000
"""Keys looked at by one SCAN: a few milliseconds of the server's only thread."""
MAX_THREADS = 16
MAX_PASSES = 5
"""A pass is repeated when a slot moved under it or a node failed."""
MAX_PREFIX_CHARACTERS = 64
PAUSE_SECONDS = 1.0
_DEFAULT_PREFIX = re.compile(r"kvpool:[a-z0-9-]{1,63}/[a-z0-9-]{1,63}:")
_BLOCK = rb"[0-9a-f]{32}:[0-9]+:\{[0-9a-f]{64}\}(?::1)?"
"""What follows the prefix: domain, group, block hash, part (DESIGN section 5)."""


@dataclass(frozen=True, slots=True)
class Erased:
    """deleted: keys. remaining: about how many are left. problem: why some are, "" when all are gone."""

    deleted: int
    remaining: int = 0
    problem: str = ""


def key_pattern(prefix: str) -> re.Pattern[bytes]:
    """What a key to delete must match as a whole; ConfigError when the prefix is none of a pool's."""
    if not prefix:
        raise ConfigError("--prefix is empty and would take every key; give the pool's key prefix")
    if any(character in "{}" or character.isspace() or not character.isprintable() for character in prefix):
        raise ConfigError(f"--prefix {prefix!r} has a brace, white space or an unprintable character: no pool has such")
    is_default = _DEFAULT_PREFIX.fullmatch(prefix) is not None
    if len(prefix) > MAX_PREFIX_CHARACTERS and not is_default:
        raise ConfigError(f"--prefix has {len(prefix)} characters; a pool's has at most {MAX_PREFIX_CHARACTERS}")
    return re.compile(re.escape(prefix.encode()) + (b".*" if is_default else _BLOCK), re.DOTALL)


def erase(endpoints: Sequence[Address], prefix: str, access: Access, *, deadline: float) -> Erased:
    """Delete the prefix's keys on every primary. deadline: monotonic seconds.

    Raises ConfigError for the prefix, and the errors of `wire` when no endpoint lets us in.
    """
    pattern = key_pattern(prefix)
    primaries = find_primaries(endpoints, access)
    total = Erased(0)
    for _ in range(MAX_PASSES):
        with ThreadPoolExecutor(max_workers=min(MAX_THREADS, len(primaries)), thread_name_prefix="purge") as threads:
            parts = list(threads.map(lambda node: _Eraser(node, prefix, pattern, access, deadline).run(), primaries))
        total = Erased(
            deleted=total.deleted + sum(part.deleted for part in parts),
            remaining=sum(part.remaining for part in parts),
            problem="; ".join(part.problem for part in parts if part.problem),
        )
        if not total.problem or time.monotonic() + PAUSE_SECONDS >= deadline:
            break
        time.sleep(PAUSE_SECONDS)
        with contextlib.suppress(KVPoolError):
            primaries = find_primaries(endpoints, access)
    return total


def find_primaries(endpoints: Sequence[Address], access: Access) -> list[Address]:
    """Every node that has keys of its own, asked from the first endpoint that answers; raises its error if none does."""
    replicas: list[Address] = []
    problem: KVPoolError | None = None
    for host, port in endpoints:
        try:
            with Wire(host, port, access) as wire:
                if _is_cluster(wire):
                    return _slot_owners(cast(list[Reply], wire.ask("CLUSTER", "SLOTS")), host)
                if _info(wire, "replication").get("role") == "master":
                    return [(host, port)]
                replicas.append((host, port))
        except KVPoolError as error:
            problem = problem or error
    if not replicas and problem is not None:
        raise problem
    return replicas[:1]


def explain(error: KVPoolError) -> str:
    """An error with what to do about it."""
    if isinstance(error, ValkeyForbiddenError):
        return f"{error}: give the user {EXTERNAL_RIGHTS} on keys that begin with the prefix"
    return str(error)


class _Eraser:
    """One node's part of a pass."""

    def __init__(self, node: Address, prefix: str, pattern: re.Pattern[bytes], access: Access, deadline: float) -> None:
        self._node = node
        self._match = escape_glob(prefix) + "*"
        self._pattern = pattern
        self._in_slots = False
        self._access = access
        self._deadline = deadline
        self._deleted = self._scanned = self._keys = 0
        self._problem = ""

    def run(self) -> Erased:
        """Delete until all is scanned or the time is up; never raises our errors."""
        try:
            with Wire(*self._node, self._limited()) as wire:
                self._keys = cast(int, wire.ask("DBSIZE"))
                self._in_slots = _is_cluster(wire)
                self._scan(wire)
        except KVPoolError as error:
            self._problem = explain(error)
        return Erased(self._deleted, self._remaining() if self._problem else 0, self._problem)

    def _limited(self) -> Access:
        left = max(0.1, self._deadline - time.monotonic())
        return replace(self._access, timeout_seconds=min(self._access.timeout_seconds, left))

    def _scan(self, wire: Wire) -> None:
        """Each round trip deletes what the one before it found."""
        cursor, found = b"0", list[bytes]()
        while True:
            if time.monotonic() >= self._deadline:
                self._problem = f"the time was up before {self._node[0]}:{self._node[1]} was searched"
                return
            scan = ("SCAN", cursor, "MATCH", self._match, "COUNT", SCAN_COUNT)
            *counts, page = wire.exchange([*self._unlinks(found), scan])
            self._count(wire, counts)
            if isinstance(page, ResponseError):
                raise wire.translated(page)
            cursor, keys = cast(tuple[bytes, list[bytes]], page)
            self._scanned += SCAN_COUNT
            found = [key for key in keys if self._pattern.fullmatch(key)]
            if cursor == b"0":
                self._count(wire, wire.exchange(self._unlinks(found)) if found else [])
                return

    def _unlinks(self, keys: Sequence[bytes]) -> list[Arguments]:
        """One command a slot: a cluster takes no keys of several, and SCAN gives them slot by slot."""
        if not self._in_slots:
            return [("UNLINK", *keys)] if keys else []
        return [("UNLINK", *group) for _, group in itertools.groupby(keys, key_slot)]

    def _count(self, wire: Wire, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, NoPermissionError | ReadOnlyError):
                raise wire.translated(reply)
            if isinstance(reply, ResponseError):
                self._problem = str(wire.translated(reply))
            else:
                self._deleted += cast(int, reply)

    def _remaining(self) -> int:
        """As many in what was not looked at as in what was; all of it when nothing was."""
        unseen = max(0, self._keys - self._scanned)
        return unseen if not self._scanned else round(self._deleted * unseen / self._scanned)


def _slot_owners(reply: Sequence[Reply], asked: str) -> list[Address]:
    """The first node of each range; an empty host means the one that was asked."""
    owners: dict[Address, None] = {}
    for entry in reply:
        host, port = cast(list[Reply], cast(list[Reply], entry)[2])[:2]
        owners[(host.decode() if isinstance(host, bytes) and host else asked, cast(int, port))] = None
    return list(owners)


def _is_cluster(wire: Wire) -> bool:
    return _info(wire, "cluster").get("cluster_enabled") == "1"


def _info(wire: Wire, section: str) -> dict[str, str]:
    text = cast(bytes, wire.ask("INFO", section)).decode(errors="replace")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
