"""The worker side: copies between the engine's cache and the arena, one thread a direction.

Invariants: the engine's thread never waits for the agent, only for a block copy in flight; a job always ends, at its
deadline at the latest; towards vLLM every job succeeds (its own code asserts so), failed loads are named separately.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvpool_core import slot_table, wire
from kvpool_vllm.arena_view import Placement
from kvpool_vllm.copiers import Copier
from kvpool_vllm.copy_plan import GroupPlan, Pointers, Sizes
from kvpool_vllm.settings import Settings
from kvpool_vllm.transfer_specs import LoadSpec, StoreSpec
from kvpool_vllm.worker_link import WorkerLink

logger = logging.getLogger("vllm.kvpool")


class Outcome(enum.Enum):
    """How a job ended."""

    DONE = "done"
    DROPPED = "dropped"
    FAILED = "failed"


BATCH_BLOCKS = 16
"""Blocks copied at once: enough to keep a device's copy engine busy, few enough for `wait` to be short (32 MiB at 8B)."""

T = TypeVar("T")
Moves = tuple[Pointers, Pointers, Sizes]


@dataclass(slots=True, eq=False)
class Job:
    """One store or load. `blocks`: per block its group's index and its id in the engine's cache."""

    job_id: int
    spec: StoreSpec | LoadSpec
    blocks: list[tuple[int, int]]
    after: object
    deadline: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    reported: bool = False


class KvpoolWorker(OffloadingWorker):
    """vLLM's OffloadingWorker over the node's arena."""

    def __init__(self, plans: list[GroupPlan], link: WorkerLink, copier: Copier, settings: Settings) -> None:
        self._plans = plans
        self._link = link
        self._copier = copier
        self._settings = settings
        self._lock = threading.Lock()
        self._live: dict[int, Job] = {}
        self._finished: list[TransferResult] = []
        self._failed_loads: set[int] = set()
        self._agent_silent_since = 0.0
        self._stores: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        for jobs, run in ((self._stores, self._store), (self._loads, self._load)):
            threading.Thread(target=self._work, args=(jobs, run), name="kvpool-copy", daemon=True).start()

    # --- OffloadingWorker: the engine's thread --------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Queue a copy from the cache into the arena."""
        assert isinstance(dst_spec, StoreSpec)
        self._stores.put(self._accept(job_id, dst_spec, src_spec))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Queue a copy from the arena into the cache."""
        assert isinstance(src_spec, LoadSpec)
        self._loads.put(self._accept(job_id, src_spec, dst_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def take_failed_loads(self, finished: set[int]) -> set[int]:
        """Which of these finished loads ended without their data; each is told once, with its end."""
        with self._lock:
            failed = self._failed_loads & finished
            self._failed_loads -= failed
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Cancel these jobs: what has not been copied yet never will be; returns when no copy of theirs is in flight."""
        with self._lock:
            jobs = [self._live[job_id] for job_id in job_ids if job_id in self._live]
            for job in jobs:
                job.cancelled.set()
        if jobs:
            with self._link.store_lock, self._link.load_lock:  # every copy happens under one of them: now none does
                pass
        for job in jobs:
            self._report(job, Outcome.DROPPED if isinstance(job.spec, StoreSpec) else Outcome.FAILED, 0, 0.0)

    def end_all(self) -> None:
        """Cancel everything that is in flight."""
        with self._lock:
            jobs = set(self._live)
        self.wait(jobs)

    def shutdown(self) -> None:
        """End threads and connection."""
        self._stores.put(None)
        self._loads.put(None)
        self._link.close()

    # --- the copy threads -----------------------------------------------------------------------------------------

    def _work(self, jobs: queue.SimpleQueue[Job | None], run: Callable[[Job], Outcome]) -> None:
        while (job := jobs.get()) is not None:
            started = time.monotonic()
            try:
                outcome = run(job)
            except Exception:
                logger.exception(
                    "kvpool: copying job %d failed; its blocks are not offloaded or are recomputed", job.job_id
                )
                outcome = Outcome.FAILED
                if isinstance(job.spec, StoreSpec):
                    self._link.abort(job.job_id)
            size = sum(self._plans[group].payload_bytes for group, _ in job.blocks) if outcome is Outcome.DONE else 0
            self._report(job, outcome, size, time.monotonic() - started)

    def _store(self, job: Job) -> Outcome:
        spec = job.spec
        assert isinstance(spec, StoreSpec)
        epoch = self._link.epoch
        reserved = self._reserve(job, spec)
        if reserved is None or not self._copy_out(job, reserved, epoch):
            self._link.abort(job.job_id)
            return Outcome.DROPPED
        return Outcome.DONE if self._link.ack(job.job_id) else Outcome.DROPPED

    def _reserve(self, job: Job, spec: StoreSpec) -> wire.Reserved | None:
        """Slots for the job; None when cancelled, late, without an agent that knows us, or while it has stopped answering."""
        now = time.monotonic()
        if job.cancelled.is_set() or now > job.deadline or not self._link.can_reserve:
            return None
        if self._link.client.last_heard < self._agent_silent_since:
            return None
        seconds = min(self._settings.reserve_deadline_seconds, job.deadline - now)
        reserved = self._link.reserve(job.job_id, spec.domain, spec.private, spec.keys, seconds)
        if reserved is None:
            self._agent_silent_since = now
        elif len(reserved.kinds) != len(spec.keys):
            raise ValueError(f"the agent answered {len(reserved.kinds)} of {len(spec.keys)} keys of job {job.job_id}")
        return reserved

    def _copy_out(self, job: Job, reserved: wire.Reserved, epoch: int) -> bool:
        """Copy into the slots; False when that was not done to the end. epoch: of the connection that was asked."""
        answers = zip(job.blocks, reserved.kinds, reserved.slots, reserved.generations, strict=True)
        wanted = [(block, slot, generation) for block, kind, slot, generation in answers if kind == wire.SLOT]
        for batch in _batches(wanted):
            with self._link.store_lock:
                arena = self._link.arena
                if arena is None or job.cancelled.is_set() or epoch != self._link.epoch:
                    return False
                if time.monotonic_ns() >= reserved.write_until_ns or time.monotonic() > job.deadline:
                    return False
                moves = []
                for (group, block_id), slot, generation in batch:
                    plan, place = self._plans[group], Placement(arena.arena_id, slot, generation)
                    address = arena.locate(place, plan.payload_bytes, state=slot_table.WRITING)
                    if address is None:
                        return False
                    parts = plan.fragments(block_id, storing=True)
                    moves.append((parts.cache, parts.payload + np.uint64(address), parts.sizes))
                self._copier.copy(*_joined(moves), to_cache=False, after=job.after)
        return not job.cancelled.is_set()

    def _load(self, job: Job) -> Outcome:
        spec = job.spec
        assert isinstance(spec, LoadSpec)
        for batch in _batches(list(zip(job.blocks, spec.placements, strict=True))):
            with self._link.load_lock:
                arena = self._link.arena
                if arena is None or job.cancelled.is_set():
                    return Outcome.FAILED
                moves = []
                for (group, block_id), place in batch:
                    plan = self._plans[group]
                    address = arena.locate(place, plan.payload_bytes, state=slot_table.READY)
                    if address is None:
                        return Outcome.FAILED
                    parts = plan.fragments(block_id, storing=False)
                    moves.append((parts.payload + np.uint64(address), parts.cache, parts.sizes))
                self._copier.copy(*_joined(moves), to_cache=True, after=job.after)
                unchanged = all(arena.is_still(place, state=slot_table.READY) for _, place in batch)
                if not unchanged or self._is_outdated(spec):
                    return Outcome.FAILED
        return Outcome.DONE

    def _is_outdated(self, spec: LoadSpec) -> bool:
        """A lost agent's table no longer shows what its successor does, and the loss may not be known yet: the lease counts."""
        return time.monotonic_ns() >= spec.lease_until_ns

    # --- book-keeping -------------------------------------------------------------------------------------------------

    def _accept(self, job_id: int, spec: StoreSpec | LoadSpec, cache: GPULoadStoreSpec) -> Job:
        groups = [group for group, count in enumerate(cache.group_sizes) for _ in range(count)]
        blocks = list(zip(groups, (int(b) for b in cache.block_ids), strict=True))
        deadline = time.monotonic() + self._settings.job_deadline_seconds
        job = Job(job_id, spec, blocks, self._copier.mark(), deadline)
        with self._lock:
            self._live[job_id] = job
        return job

    def _report(self, job: Job, outcome: Outcome, size: int, seconds: float) -> None:
        """Report a job once; the copy thread and `wait` may both come here."""
        with self._lock:
            if job.reported:
                return
            job.reported = True
            self._live.pop(job.job_id, None)
            timed = outcome is Outcome.DONE
            self._finished.append(TransferResult(job.job_id, True, size if timed else None, seconds if timed else None))
            failed = isinstance(job.spec, LoadSpec) and outcome is not Outcome.DONE
            if failed:
                self._failed_loads.add(job.job_id)
        if failed:
            logger.warning("kvpool: load job %d failed (%s); its request is recomputed", job.job_id, outcome.value)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH_BLOCKS):
        yield items[start : start + BATCH_BLOCKS]


def _joined(moves: list[Moves]) -> Moves:
    source, destination, sizes = zip(*moves, strict=True)
    return np.concatenate(source), np.concatenate(destination), np.concatenate(sizes)
