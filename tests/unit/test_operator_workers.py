"""Threads that take pools from the queue, and what they do when the API server or the Lease lets them down for a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry

from kvpool_operator.fence import MARGIN_SECONDS
from kvpool_operator.leadership import Term
from kvpool_operator.metrics import OperatorMetrics
from kvpool_operator.reconcile import Key, Reconciler
from kvpool_operator.story import Storyteller
from kvpool_operator.work_queue import WorkQueue
from kvpool_operator.workers import Office, Workers
from tests.unit.fake_api_server import FakeApiServer, Refusal
from tests.unit.operator_pools import SETTINGS, manifest
from tests.unit.played_cluster import KEY, NOW, Healthy

LONG_SECONDS = 3600.0
"""No test waits for a period to end."""


def office(api: FakeApiServer, term: Term) -> Office:
    """Of one term, which is also the fence of all that is written."""
    kube = api.kube(term)
    story = Storyteller(kube, identity="me", monotonic=lambda: 0.0, wall_clock=lambda: "2026-01-01T12:00:00Z")
    reconciler = Reconciler(kube, SETTINGS, fence=term, story=story, heal=Healthy(), clock=lambda: NOW)
    return Office(term=term, kube=kube, reconciler=reconciler)


def workers(queue: WorkQueue[Key]) -> Workers:
    """Without threads of their own."""
    settings = replace(SETTINGS, resync_seconds=LONG_SECONDS)
    return Workers(settings=settings, queue=queue, metrics=OperatorMetrics(CollectorRegistry()))


@contextmanager
def running(all_workers: Workers, work: Callable[[], None]) -> Iterator[None]:
    """One of its threads, until the block ends."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        all_workers.stop()
        thread.join(30)


def test_first_resync_of_a_term_that_fails_is_tried_again_soon(api: FakeApiServer) -> None:
    api.put(manifest())
    queue: WorkQueue[Key] = WorkQueue()
    all_workers = workers(queue)
    failures = iter((Refusal(500, "etcd has no leader"), Refusal(429, "too many requests")))

    def fail_twice(kind: str) -> None:
        failure = next(failures, None) if kind == "KVCachePool" else None
        if failure is not None:
            raise failure

    api.on_read = fail_twice
    all_workers.begin(office(api, Term(float("inf"), lambda: 0.0)))
    with running(all_workers, all_workers.resync):
        assert queue.take(LONG_SECONDS / 60) == KEY
    assert next(failures, None) is None


def test_pool_that_met_the_end_of_a_lease_that_was_then_renewed_is_looked_at_again(api: FakeApiServer) -> None:
    api.put(manifest())
    queue: WorkQueue[Key] = WorkQueue()
    all_workers = workers(queue)
    term = Term(MARGIN_SECONDS / 2, lambda: 0.0)
    all_workers.begin(office(api, term))
    queue.add(KEY)
    assert queue.take(30) == KEY

    all_workers._look_at(KEY)
    term.extend(100.0)

    assert api.writes == []
    assert queue.take(30) == KEY
    all_workers._look_at(KEY)
    assert api.names("DaemonSet") == ["chat-agent"]


def test_pool_that_met_the_end_of_a_term_is_left_to_the_next_one(api: FakeApiServer) -> None:
    api.put(manifest())
    queue: WorkQueue[Key] = WorkQueue()
    all_workers = workers(queue)
    now = [0.0]
    term = Term(MARGIN_SECONDS, lambda: now[0])
    all_workers.begin(office(api, term))

    def pass_by(_kind: str) -> None:
        now[0] = 2 * MARGIN_SECONDS

    api.on_read = pass_by
    queue.add(KEY)
    assert queue.take(30) == KEY

    all_workers._look_at(KEY)

    assert (len(queue), queue.busy, api.writes) == (0, 0, [])
