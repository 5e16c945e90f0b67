"""Which replica leads: a coordination Lease.

Invariant: `remaining_seconds()` is above 0 only while no other replica can hold the Lease: it ends RENEW_DEADLINE_SECONDS
after the *request* that last renewed it, and others wait LEASE_SECONDS from when they first saw that renewal.
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


def is_free(sighting: Sighting, now: float) -> bool:
    """Whether the Lease may be taken from its holder."""
    return not sighting.record.holder or now > sighting.since + sighting.record.duration_seconds


class Leadership:
    """Takes part in the election. The fence of every write (`fence.Fence`)."""

    def __init__(
        self,
        store: LeaseStore,
        identity: str,
        *,
        on_change: Callable[[bool], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], str],
    ) -> None:
        """on_change: called with True when this replica begins to lead, with False when it ends."""
        self._store = store
        self._identity = identity
        self._on_change = on_change
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._deadline = float("-inf")
        self._sighting: Sighting | None = None
        self._told = False
        self._stop = threading.Event()

    def remaining_seconds(self) -> float:
        """How long this replica may write."""
        return self._deadline - self._monotonic()

    @property
    def is_leading(self) -> bool:
        """Whether it may write now."""
        return self.remaining_seconds() > 0

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
        asked_at = self._monotonic()
        record = self._store.read()
        if record is None:
            self._write(asked_at, LeaseRecord(holder=self._identity), self._store.create)
        elif record.holder == self._identity:
            self._write(asked_at, record, self._store.replace)
        else:
            self._deadline = float("-inf")
            self._look_on(record, asked_at)

    def _look_on(self, record: LeaseRecord, now: float) -> None:
        if self._sighting is None or self._sighting.record != record:
            self._sighting = Sighting(record, now)
        if is_free(self._sighting, now):
            taken = replace(record, holder=self._identity, acquired="", transitions=record.transitions + 1)
            self._write(now, taken, self._store.replace)

    def _write(self, asked_at: float, record: LeaseRecord, write: Callable[[LeaseRecord], bool]) -> None:
        now = self._wall_clock()
        renewed = replace(
            record, renewed=now, acquired=record.acquired or now, duration_seconds=LEASE_SECONDS, holder=self._identity
        )
        if write(renewed):
            self._deadline = asked_at + RENEW_DEADLINE_SECONDS
            self._sighting = None

    def _release(self) -> None:
        if not self.is_leading:
            return
        self._deadline = float("-inf")
        try:
            record = self._store.read()
            if record is not None and record.holder == self._identity:
                self._store.replace(replace(record, holder="", duration_seconds=1, renewed=self._wall_clock()))
        except KubeError as error:
            log.info("could not release the lease: it ends by itself", extra={"data": {"reason": str(error)}})

    def _tell(self) -> None:
        if self.is_leading != self._told:
            self._told = not self._told
            log.info("leading" if self._told else "not leading", extra={"data": {"identity": self._identity}})
            self._on_change(self._told)
