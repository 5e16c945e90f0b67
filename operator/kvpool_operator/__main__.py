"""Entry point: `python -m kvpool_operator`.

Invariant: exit status 0 after SIGTERM or SIGINT with the Lease let go, 2 for a wrong environment, 1 when a part ended that
must not; nothing writes after the Lease was let go.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from prometheus_client import REGISTRY

from kvpool_core.errors import ConfigError
from kvpool_operator import handlers, names, reasons
from kvpool_operator.directory import Directory
from kvpool_operator.fence import OpenFence
from kvpool_operator.health import HealthServer
from kvpool_operator.kube import Kube, connect
from kvpool_operator.kube_errors import KubeError
from kvpool_operator.leadership import Leadership, Term
from kvpool_operator.lease import KubeLease
from kvpool_operator.logs import set_up_logging
from kvpool_operator.metrics import OperatorMetrics
from kvpool_operator.moments import rfc3339
from kvpool_operator.pokes import CLUSTER_KINDS, Key, News, pool_key
from kvpool_operator.reconcile import Reconciler
from kvpool_operator.settings import Settings, read_settings
from kvpool_operator.story import Storyteller
from kvpool_operator.valkey_health import heal
from kvpool_operator.webhook_service import WebhookService
from kvpool_operator.work_queue import WorkQueue
from kvpool_operator.workers import Office, Workers

POKE_DELAY_SECONDS = 0.2
"""Events come in bursts."""
STOP_SECONDS = 20.0
"""For writes in flight at the end; the pod's grace period is longer."""

log = logging.getLogger("kvpool.operator")


def utc_now() -> datetime:
    """Now."""
    return datetime.now(UTC)


def micro_time() -> str:
    """Now as Leases have it; distinct each time."""
    return utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Operator:
    """Every part of one replica."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._api = connect()
        shared = Kube(self._api, OpenFence())
        self._metrics = OperatorMetrics(REGISTRY)
        self._leadership = Leadership(
            KubeLease(shared, settings.namespace, settings.service_name),
            settings.identity,
            on_change=self._on_leadership,
            wall_clock=micro_time,
        )
        self._queue: WorkQueue[Key] = WorkQueue()
        self._workers = Workers(settings=settings, queue=self._queue, metrics=self._metrics)
        self._news = News()
        self._directory = Directory(shared, settings)
        self._webhook = (
            WebhookService(shared, settings, self._directory, is_leading=lambda: self._leadership.is_leading)
            if settings.webhook_port
            else None
        )
        self._watching = threading.Event()
        self._stop_watching = threading.Event()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lost = ""

    # --- life -------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until a signal, or until a part ends that must not; the exit status."""
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._on_signal)
        health = HealthServer(
            self._settings.health_port, healthy=lambda: self._lost, ready=self._not_ready, registry=REGISTRY
        )
        self._start("health", health.serve_forever, essential=False)
        self._start("leadership", self._leadership.run)
        self._start("directory", self._directory.run)
        self._start("watch", self._watch)
        self._start("resync", self._workers.resync)
        for number in range(self._settings.workers):
            self._start(f"worker-{number}", self._workers.work)
        if self._webhook is not None:
            self._start("webhook", self._webhook.serve)
            self._start("webhook-upkeep", self._webhook.keep)
        log.info("running", extra={"data": {"identity": self._settings.identity}})
        self._ended.wait()
        self._shut_down()
        health.shutdown()
        return 1 if self._lost else 0

    def _watch(self) -> None:
        handlers.watch(
            self._poke,
            identity=self._settings.identity,
            namespaces=self._settings.watched_namespaces,
            stop=self._stop_watching,
            ready=self._watching,
        )

    def _start(self, name: str, run: Callable[[], object], *, essential: bool = True) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception:
                log.critical("a part ended with an error", exc_info=True, extra={"data": {"part": name}})
            if essential and not self._ended.is_set():
                self._lost = f"{name} ended"
                self._ended.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._ended.set()

    def _shut_down(self) -> None:
        """Workers first, the Lease last."""
        log.info("stopping", extra={"data": {"reason": self._lost or "signal"}})
        deadline = time.monotonic() + STOP_SECONDS
        self._workers.stop()
        self._stop_watching.set()
        self._directory.stop()
        if self._webhook is not None:
            self._webhook.stop()
        for thread in self._threads:
            if thread.name not in ("leadership", "health"):
                thread.join(max(0.0, deadline - time.monotonic()))
        self._leadership.stop()
        for thread in self._threads:
            if thread.name == "leadership":
                thread.join(max(1.0, deadline - time.monotonic()))

    # --- between the parts ------------------------------------------------------------------------------------------

    def _poke(self, kind: str, raw: Mapping[str, Any], is_gone: bool) -> None:
        """An event came in; on kopf's loop, so nothing here waits."""
        if kind in (*CLUSTER_KINDS, names.KIND) and not self._news.is_news(kind, raw, is_gone=is_gone):
            return
        if kind in CLUSTER_KINDS:
            self._directory.poke()
            self._workers.resync_soon()
            return
        key = pool_key(kind, raw)
        if key is None:
            return
        if kind in (names.KIND, "Pod"):
            self._directory.poke()
        if self._leadership.is_leading and self._is_watched(key):
            self._queue.add(key, POKE_DELAY_SECONDS)

    def _is_watched(self, key: Key) -> bool:
        return not self._settings.watched_namespaces or key[0] in self._settings.watched_namespaces

    def _on_leadership(self, term: Term | None) -> None:
        self._metrics.leading.set(term is not None)
        self._workers.end()
        if term is None:
            return
        kube = Kube(self._api, term)
        story = Storyteller(
            kube, identity=self._settings.identity, monotonic=time.monotonic, wall_clock=lambda: rfc3339(utc_now())
        )
        reconciler = Reconciler(kube, self._settings, fence=term, story=story, heal=heal, clock=utc_now)
        self._workers.begin(Office(term, kube, reconciler))
        # apart: whatever asks the API server here would keep this thread, the leadership's, from renewing
        threading.Thread(target=self._begin_to_lead, args=(story,), name="begin-to-lead", daemon=True).start()

    def _begin_to_lead(self, story: Storyteller) -> None:
        if self._webhook is not None:
            self._webhook.publish()
        about = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "namespace": self._settings.namespace,
            "name": self._settings.service_name,
        }
        message = f"{self._settings.identity} leads now"
        try:
            story.tell(about, reasons.LEADER_CHANGED, message, is_warning=False, once=micro_time())
        except KubeError as error:
            log.info("leading was short", extra={"data": {"reason": str(error)}})

    def _not_ready(self) -> str:
        if self._lost:
            return self._lost
        if not self._watching.is_set():
            return "the API server is not watched yet"
        if self._webhook is not None and not self._webhook.is_serving:
            return "the webhook does not serve yet"
        return ""


def main() -> int:
    """Run the operator; returns the exit status."""
    try:
        settings = read_settings(os.environ)
    except ConfigError as error:
        print(f"kvpool-operator: {error}", file=sys.stderr)  # noqa: T201  # before logging is set up
        return 2
    set_up_logging(settings.log_level, {"component": "operator", "replica": settings.identity})
    try:
        return Operator(settings).run()
    except (KubeError, OSError) as error:
        log.critical("cannot start", extra={"data": {"reason": str(error)}})
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
