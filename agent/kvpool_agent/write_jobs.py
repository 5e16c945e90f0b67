"""Store jobs: which ranks of an engine may still be copying into which slots.

Pure. Invariant: every rank of an engine gets the same answer for a job; `waiting` holds exactly the ranks that may still
write, and a job leaves the book only when it is empty.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpool_agent.slot import Slot
from kvpool_core.wire import StoreKey

ENDED_REMEMBERED = 4096
"""Failed jobs whose numbers are remembered, so that a late rank is told FULL in place of starting the job anew."""


def owner_of(engine_id: str) -> int:
    """How the slot table names an engine: 8 bytes of a digest, never 0 (0 is the agent)."""
    digest = hashlib.blake2b(engine_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer to a Reserve, one entry per key."""

    kinds: bytes
    slots: list[int]
    generations: list[int]
    write_until_ns: int


@dataclass(slots=True)
class Job:
    """`waiting` None: all ranks of an engine whose size is not known yet (after a take-over)."""

    owner: int
    number: int
    until_ns: int
    waiting: set[int] | None
    failed: bool = False
    domain: bytes = b""
    keys: Sequence[StoreKey] = ()
    answer: Reservation | None = None
    slots: list[Slot] = field(default_factory=list)


class JobBook:
    """Jobs that are not over yet."""

    def __init__(self) -> None:
        self._jobs: dict[int, dict[int, Job]] = {}
        self._ends: list[tuple[int, int, int]] = []
        self._ended: OrderedDict[tuple[int, int], None] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def add(self, job: Job) -> None:
        """Begin a job."""
        self._jobs.setdefault(job.owner, {})[job.number] = job
        heapq.heappush(self._ends, (job.until_ns, job.owner, job.number))

    def extend(self, job: Job, until_ns: int) -> None:
        """The job lasts longer."""
        job.until_ns = until_ns
        heapq.heappush(self._ends, (until_ns, job.owner, job.number))

    def get(self, owner: int, number: int) -> Job | None:
        """The job of that number, if it is not over."""
        return self._jobs.get(owner, {}).get(number)

    def of(self, owner: int) -> list[Job]:
        """The owner's jobs."""
        return list(self._jobs.get(owner, {}).values())

    def end(self, job: Job) -> None:
        """The job is over."""
        jobs = self._jobs.get(job.owner, {})
        if jobs.pop(job.number, None) is None:
            return
        if not jobs:
            del self._jobs[job.owner]
        if job.failed:
            self._remember(job.owner, job.number)

    def has_failed(self, owner: int, number: int) -> bool:
        """Whether a job of that number failed not long ago."""
        return (owner, number) in self._ended

    def expired(self, now_ns: int) -> Iterator[Job]:
        """Yield jobs whose time is over."""
        while self._ends and self._ends[0][0] <= now_ns:
            _until, owner, number = heapq.heappop(self._ends)
            job = self.get(owner, number)
            if job is not None and job.until_ns <= now_ns:
                yield job

    def _remember(self, owner: int, number: int) -> None:
        self._ended[owner, number] = None
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)
