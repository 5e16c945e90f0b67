"""Threads that take pools from the queue, and the one that puts them in from time to time.

Invariant: no error in one pool's look ends a worker; without leadership nothing is taken; what was remembered or begun in one
term of leading is of no use in the next; a pool with our finalizer is brought to its end also where none is served any more.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool_operator import names
from kvpool_operator.kube import Kube
from kvpool_operator.kube_errors import KubeError, NotFoundError, NotLeaderError
from kvpool_operator.leadership import Term
from kvpool_operator.metrics import OperatorMetrics
from kvpool_operator.reconcile import Key, Reconciler
from kvpool_operator.settings import Settings
from kvpool_operator.work_queue import WorkQueue, backoff_seconds

TAKE_SECONDS = 1.0
SPREAD = 0.5
"""A resync puts pools in over this part of its period, so that they do not all ask at once."""
NO_CRD = f"the CRD {names.PLURAL}.{names.GROUP} is missing: apply it (helm upgrade does); until then nothing is done"

log = logging.getLogger("kvpool.operator.workers")


@dataclass(frozen=True, slots=True)
class Office:
    """What a leader works with in one term, made anew for each. `kube` and `reconciler` change nothing once `term` is over."""

    term: Term
    kube: Kube
    reconciler: Reconciler


class Workers:
    """All threads that work on pools."""

    def __init__(
        self,
        *,
        settings: Settings,
        queue: WorkQueue[Key],
        metrics: OperatorMetrics,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._metrics = metrics
        self._office: Office | None = None
        self._stop = threading.Event()
        self._resync_now = threading.Event()

    def begin(self, office: Office) -> None:
        """This replica leads now: look at every pool."""
        self._office = office
        self.resync_soon()

    def end(self) -> None:
        """It leads no more."""
        self._office = None
        self._queue.clear()

    def stop(self) -> None:
        """Take nothing more."""
        self._stop.set()
        self._resync_now.set()
        self._queue.close()

    def resync_soon(self) -> None:
        """Look at every pool: something concerns them all."""
        self._resync_now.set()

    def work(self) -> None:
        """One worker, until `stop`."""
        while not self._stop.is_set():
            key = self._queue.take(TAKE_SECONDS)
            if key is not None:
                self._look_at(key)
            self._metrics.waiting.set(len(self._queue))

    def _look_at(self, key: Key) -> None:
        office = self._office
        if office is None or not office.term.is_open:
            self._queue.done(key)
            return
        started = time.monotonic()
        where = {"namespace": key[0], "pool": key[1]}
        try:
            again = office.reconciler.reconcile(key)
        except NotLeaderError:
            if office.term.remaining_seconds() > 0:  # it was nearly over, and may yet be renewed: nobody else looks
                self._queue.failed(key)
            else:
                self._queue.done(key)
        except KubeError as error:
            log.warning("could not bring a pool about", extra={"data": {**where, "reason": str(error)}})
            self._metrics.reconciles.labels("retry").inc()
            self._queue.failed(key)
        except Exception:
            log.exception("a fault of our own", extra={"data": where})
            self._metrics.reconciles.labels("error").inc()
            self._queue.failed(key)
        else:
            self._metrics.reconciles.labels("ok").inc()
            self._queue.done(key, again)
        self._metrics.seconds.observe(time.monotonic() - started)

    def resync(self) -> None:
        """Until `stop`: every pool is looked at, and what dead pools left is removed."""
        failures = 0
        while not self._stop.is_set():
            self._resync_now.clear()
            failures = 0 if self._try_resync() else failures + 1
            self._resync_now.wait(self._pause_seconds(failures))

    def _try_resync(self) -> bool:
        """False when it failed and is to be tried again soon: until the first one of a term no pool is looked at."""
        office = self._office
        if office is None or not office.term.is_open:
            return True
        try:
            self._resync_once(office)
        except NotFoundError as error:
            log.warning(NO_CRD, extra={"data": {"reason": str(error)}})
        except KubeError as error:
            log.warning("could not resync", extra={"data": {"reason": str(error)}})
            return False
        return True

    def _pause_seconds(self, failures: int) -> float:
        period = self._settings.resync_seconds
        return min(period, backoff_seconds(failures, random.random())) if failures else period

    def _resync_once(self, office: Office) -> None:
        metas = [raw["metadata"] for raw in office.kube.list_all(names.KIND)]
        watched = self._settings.watched_namespaces
        served = {(meta["namespace"], meta["name"]) for meta in metas if not watched or meta["namespace"] in watched}
        self._metrics.pools.set(len(served))
        keys = served | {(meta["namespace"], meta["name"]) for meta in metas if _waits_for_us(meta)}
        office.reconciler.expect(keys)
        spread = self._settings.resync_seconds * SPREAD if len(keys) > self._settings.workers else 0.0
        for key in keys:
            self._queue.add(key, random.random() * spread)
        office.reconciler.collect()


def _waits_for_us(meta: Mapping[str, Any]) -> bool:
    """Whether a pool is being deleted and nobody else may take the finalizer off."""
    return bool(meta.get("deletionTimestamp")) and names.FINALIZER in (meta.get("finalizers") or ())
