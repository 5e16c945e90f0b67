"""Which replica leads: a coordination Lease.

Invariant: a `Term` is open only while no other replica can hold the Lease: it ends RENEW_DEADLINE_SECONDS after the *start* of
the request that last renewed it, and others wait LEASE_SECONDS from the *answer* to the read that first showed them that renewal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from kvpool_operator.kube_errors import KubeError

LEASE_SECONDS = 20
RENEW_DEADLINE_SECONDS = 15.0
"""5 s below the lease: clocks run at different speeds and a write may take a moment to arrive."""
RETRY_SECONDS = 2.0

log = logging.getLogger("kvpool.operator.leadership")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """What the Lease says. `renewed`: any text that changes with each renewal; `version`: for optimistic concurrency."""

    holder: str
    renewed: str = ""
    acquired: str = ""
    duration_seconds: int = LEASE_SECONDS
    transitions: int = 0
    version: str = ""


class LeaseStore(Protocol):
    """Where the record lies. Both writes return False when somebody else was faster."""

    def read(self) -> LeaseRecord | None:
        """The record; None when there is none yet."""

    def create(self, record: LeaseRecord) -> bool:
        """Write the first one."""

    def replace(self, record: LeaseRecord) -> bool:
        """Write over the one with the same version."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record of somebody else and when (monotonic seconds) it was first seen like this."""

    record: LeaseRecord
    since: float


class Term:
    """A time of leading without a break: the fence of all that is begun in it. Over once, it never opens again.

    So what a thread began in one term is not sent in a later one, in which others may have changed everything meanwhile.
    """

    def __init__(self, deadline: float, monotonic: Callable[[], float]) -> None:
        self._deadline = deadline
        self._monotonic = monotonic

    def remaining_seconds(self) -> float:
        """How long its leader may write; 0 or less when it is over."""
        return self._deadline - self._monotonic()

    @property
    def is_open(self) -> bool:
        """Whether its leader may write now."""
        return self.remaining_seconds() > 0

    def extend(self, deadline: float) -> None:
        """The Lease was renewed."""
        self._deadline = deadline

    def end(self) -> None:
        """The Lease is another's, or about to be let go."""
        self._deadline = float("-inf")


def boot_seconds() -> float:
    """A clock that also runs while the machine sleeps, as other machines' clocks do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_free(sighting: Sighting, now: float) -> bool:
    """Whether the Lease may be taken from its holder."""
    return not sighting.record.holder or now > sighting.since + sighting.record.duration_seconds


class Leadership:
    """Takes part in the election."""

    def __init__(
        self,
        store: LeaseStore,
        identity: str,
        *,
        on_change: Callable[[Term | None], None],
        monotonic: Callable[[], float] = boot_seconds,
        wall_clock: Callable[[], str],
    ) -> None:
        """on_change: called with each term of this replica when it begins, with None when it leads no more."""
        self._store = store
        self._identity = identity
        self._on_change = on_change
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._term: Term | None = None
        self._sighting: Sighting | None = None
        self._told: Term | None = None
        self._stop = threading.Event()

    @property
    def is_leading(self) -> bool:
        """Whether this replica may write now."""
        return self._term is not None and self._term.is_open

    def run(self) -> None:
        """Take part until `stop`; then let the Lease go."""
        while not self._stop.is_set():
            try:
                self.step()
            except KubeError as error:
                log.warning("cannot look at the lease", extra={"data": {"reason": str(error)}})
            self._tell()
            self._stop.wait(RETRY_SECONDS)
        self._release()
        self._tell()

    def stop(self) -> None:
        """End `run`: call it once nothing writes any more."""
        self._stop.set()

    def step(self) -> None:
        """Renew, take, or look on."""
        record = self._store.read()
        if record is None:
            self._write(LeaseRecord(holder=self._identity), self._store.create)
        elif record.holder == self._identity:
            self._write(record, self._store.replace)
        else:
            self._end_term()
            self._look_on(record, answered_at=self._monotonic())

    def _look_on(self, record: LeaseRecord, *, answered_at: float) -> None:
        """The holder may have renewed at any time up to the answer, so nothing counts from before it."""
        if self._sighting is None or self._sighting.record != record:
            self._sighting = Sighting(record, answered_at)
        if is_free(self._sighting, answered_at):
            taken = replace(record, holder=self._identity, acquired="", transitions=record.transitions + 1)
            self._write(taken, self._store.replace)

    def _write(self, record: LeaseRecord, write: Callable[[LeaseRecord], bool]) -> None:
        """Others see it at the earliest when it is asked for, so the time counts from there."""
        asked_at = self._monotonic()
        now = self._wall_clock()
        renewed = replace(
            record, renewed=now, acquired=record.acquired or now, duration_seconds=LEASE_SECONDS, holder=self._identity
        )
        if write(renewed):
            self._sighting = None
            self._go_on(asked_at + RENEW_DEADLINE_SECONDS)

    def _go_on(self, deadline: float) -> None:
        if self._term is not None and self._term.is_open:
            self._term.extend(deadline)
        else:
            self._term = Term(deadline, self._monotonic)

    def _end_term(self) -> None:
        if self._term is not None:
            self._term.end()
            self._term = None

    def _release(self) -> None:
        if not self.is_leading:
            return
        self._end_term()
        try:
            record = self._store.read()
            if record is not None and record.holder == self._identity:
                self._store.replace(replace(record, holder="", duration_seconds=1, renewed=self._wall_clock()))
        except KubeError as error:
            log.info("could not release the lease: it ends by itself", extra={"data": {"reason": str(error)}})

    def _tell(self) -> None:
        term = self._term if self.is_leading else None
        if term is not self._told:
            self._told = term
            log.info("not leading" if term is None else "leading", extra={"data": {"identity": self._identity}})
            self._on_change(term)
