"""Reading blocks from Valkey: existence and payloads, in batches of one shard, on the tier's threads.

Invariant: every job is reported exactly once, and a target is written only after header and checksums were found right.
Replies come in any order (redirected ones last), so each is kept with the part that it answers for.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from valkey.exceptions import ResponseError

from kvpool_agent.valkey_exchange import Reply, Request
from kvpool_agent.valkey_keys import BlockKey, part_name
from kvpool_agent.valkey_link import ValkeyLink
from kvpool_agent.valkey_payload_sizes import PayloadSizes
from kvpool_agent.valkey_value import HEADER_BYTES, assemble, part_sizes
from kvpool_core.errors import ValueFormatError

EXISTS_BATCH = 512
"""Keys per pipeline of EXISTS: its replies arrive within a few milliseconds."""


class FetchOutcome(enum.Enum):
    """OK: the payload is in the target. MISS: not there, or not what it should be. FAILED: not found out."""

    OK = "ok"
    MISS = "miss"
    FAILED = "failed"


@dataclass(slots=True)
class FetchJob:
    """Read one block into `target` (exactly its payload bytes); `report` gets outcome and checksum."""

    key: BlockKey
    target: memoryview
    report: Callable[[FetchOutcome, int], None]
    is_cancelled: Callable[[], bool]
    replies: dict[int, Reply] = field(default_factory=dict)


@dataclass(slots=True)
class LookupJob:
    """Ask for existence; `report` gets, per key, whether the whole block is there (unknown = False)."""

    keys: Sequence[BlockKey]
    report: Callable[[list[bool]], None]


class ValkeyReader:
    """Runs batches of jobs. `on_hints(kind, keys)` may be called from any thread."""

    def __init__(
        self,
        link: ValkeyLink,
        *,
        key_prefix: str,
        may_delete: bool,
        sizes: PayloadSizes,
        on_hints: Callable[[str, Sequence[BlockKey]], None],
    ) -> None:
        self._link = link
        self._metrics = link.metrics
        self._prefix = key_prefix
        self._may_delete = may_delete
        self._sizes = sizes
        self._on_hints = on_hints

    def fetch_batch(self, shard: str, jobs: Sequence[FetchJob]) -> None:
        """Fetch blocks of one shard, reporting each as soon as its parts are in."""
        unreported = {id(job): job for job in jobs}
        bad: list[BlockKey] = []
        try:
            wanted = [job for job in jobs if not job.is_cancelled()]
            self._metrics.operation("get", "cancelled", len(jobs) - len(wanted))
            if wanted and self._link.health.is_usable(shard):
                self._fetch(shard, wanted, unreported, bad)
        finally:
            self._metrics.operation("get", "failed", sum(not job.is_cancelled() for job in unreported.values()))
            for job in unreported.values():
                job.report(FetchOutcome.FAILED, 0)
        self._delete(shard, bad)

    def lookup_batch(self, shard: str, jobs: Sequence[LookupJob]) -> None:
        """Ask for existence on one shard."""
        for job in jobs:
            found = [False] * len(job.keys)
            try:
                for start in range(0, len(job.keys), EXISTS_BATCH):
                    if not self._link.health.is_usable(shard):
                        break
                    self._lookup(shard, job.keys[start : start + EXISTS_BATCH], found, start)
            finally:
                job.report(found)

    def part_names(self, key: BlockKey) -> list[bytes]:
        """The Valkey keys that a block has as far as its size is known, part 0 first."""
        size = self._sizes.get(key)
        return [part_name(self._prefix, key, part) for part in range(len(part_sizes(size)) if size is not None else 1)]

    # --------------------------------------------------------------------------------------------------- payloads

    def _fetch(
        self, shard: str, jobs: Sequence[FetchJob], unreported: dict[int, FetchJob], bad: list[BlockKey]
    ) -> None:
        requests, owners, moved = self._requests(jobs)
        for index, reply in self._link.ask(shard, requests, op="get", moved_bytes=moved, key=jobs[0].key):
            job, part = owners[index]
            job.replies[part] = reply
            if len(job.replies) < len(part_sizes(len(job.target))):
                continue
            outcome, checksum, result = self._take(job, bad)
            job.replies.clear()
            del unreported[id(job)]
            self._metrics.operation("get", result)
            if outcome is FetchOutcome.MISS:
                self._on_hints("removed", [job.key])
            job.report(outcome, checksum)

    def _requests(self, jobs: Sequence[FetchJob]) -> tuple[list[Request], list[tuple[FetchJob, int]], int]:
        requests: list[Request] = []
        owners: list[tuple[FetchJob, int]] = []
        moved = 0
        for job in jobs:
            for part, size in enumerate(part_sizes(len(job.target))):
                requests.append((b"GET", part_name(self._prefix, job.key, part)))
                owners.append((job, part))
                moved += HEADER_BYTES + size
        return requests, owners, moved

    def _take(self, job: FetchJob, bad: list[BlockKey]) -> tuple[FetchOutcome, int, str]:
        """(outcome, checksum, metric result) of a block whose replies are all there."""
        replies = [job.replies[part] for part in sorted(job.replies)]
        values = [reply for reply in replies if isinstance(reply, bytes | bytearray)]
        self._metrics.moved("read", sum(map(len, values)))
        errors = [reply for reply in replies if isinstance(reply, ResponseError)]
        if errors:
            return self._take_error(job, errors, bad)
        if len(values) < len(replies):
            if replies[0] is not None:  # part 0 is written last: without part 1 the block is broken for good
                bad.append(job.key)
            return FetchOutcome.MISS, 0, "incomplete" if values else "miss"
        try:
            block = assemble(job.key, values, len(job.target))
        except ValueFormatError as error:
            self._metrics.bad_value(error.reason)
            bad.append(job.key)
            return FetchOutcome.MISS, 0, "bad"
        offset = 0
        for piece in block.pieces:
            job.target[offset : offset + len(piece)] = piece
            offset += len(piece)
        self._sizes.learn(job.key, offset)
        return FetchOutcome.OK, block.checksum, "ok"

    def _take_error(
        self, job: FetchJob, errors: Sequence[ResponseError], bad: list[BlockKey]
    ) -> tuple[FetchOutcome, int, str]:
        if any("WRONGTYPE" in str(error) for error in errors):
            self._metrics.bad_value("type")
            bad.append(job.key)
            return FetchOutcome.MISS, 0, "bad"
        return FetchOutcome.FAILED, 0, "failed"

    def _delete(self, shard: str, keys: Sequence[BlockKey]) -> None:
        if not keys or not self._may_delete:
            return
        requests: list[Request] = [(b"UNLINK", part_name(self._prefix, key, part)) for key in keys for part in (0, 1)]
        answers = [0] * len(keys)
        for index, reply in self._link.ask(shard, requests, op="unlink"):
            answers[index // 2] += isinstance(reply, int)
        done = answers.count(2)
        self._metrics.operation("unlink", "ok", done)
        self._metrics.operation("unlink", "failed", len(keys) - done)

    # -------------------------------------------------------------------------------------------------- existence

    def _lookup(self, shard: str, keys: Sequence[BlockKey], found: list[bool], start: int) -> None:
        """A block is there when all its parts are, absent when one is, and unknown when no answer says either."""
        names = [self.part_names(key) for key in keys]
        owners = [number for number, parts in enumerate(names) for _ in parts]
        requests: list[Request] = [(b"EXISTS", name) for parts in names for name in parts]
        there, absent = [0] * len(keys), set[int]()
        for index, reply in self._link.ask(shard, requests, op="exists", key=keys[0]):
            if reply == 1:
                there[owners[index]] += 1
            elif isinstance(reply, int):
                absent.add(owners[index])
        whole = [number for number, parts in enumerate(names) if there[number] == len(parts)]
        for number in whole:
            found[start + number] = True
        self._metrics.operation("exists", "ok", len(whole))
        self._metrics.operation("exists", "miss", len(absent))
        self._metrics.operation("exists", "failed", len(keys) - len(whole) - len(absent))
        for kind, numbers in (("stored", whole), ("removed", sorted(absent))):
            if numbers:
                self._on_hints(kind, [keys[number] for number in numbers])
