"""The fleet from the pool's pods.

One thread lists and watches each namespace. Invariant: what was learnt stays while the API server is away (health probes
decide meanwhile); a namespace that may not use the pool any more is gone at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvpool_core.errors import KVPoolError
from kvpool_core.kube_client import KubeClient
from kvpool_core.namespace_file import NamespaceFile
from kvpool_router.config import KubernetesDiscovery, Pool
from kvpool_router.discovery import Members
from kvpool_router.logs import fields
from kvpool_router.metrics import RouterMetrics
from kvpool_router.pods import Pod, members_of, project_pod, selector

if TYPE_CHECKING:
    from kvpool_core.kube_client import Response

CONNECT_SECONDS = 3.0
LIST_SECONDS = 15.0
LIST_LIMIT = 500
"""Pods a page: an answer of about 5 MB."""
WATCH_SECONDS = 120
"""The server ends a watch after this (more or less); one that died silently is noticed a little later."""
WATCH_GRACE_SECONDS = 15.0
LINE_MAX_BYTES = 16 << 20
BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_CAP_SECONDS = 5.0
"""An API server that restarts is followed again at most this much later."""
REPEAT_SECONDS = 0.2
"""Between two watches: a server that ends each at once must not be asked in a tight loop."""
NAMESPACES_PERIOD_SECONDS = 1.0
SETTLE_SECONDS = 0.02
"""Changes that come together are taken up together."""
EVERY_NAMESPACE = ""

log = logging.getLogger(__name__)


class ExpiredError(KVPoolError):
    """The server has forgotten what changed since: list anew."""


class WatchError(KVPoolError):
    """The server refused, or sent what is no event."""


class Api:
    """GETs of pods, with timeouts; made for use from several threads."""

    def __init__(self, label_selector: str) -> None:
        self._selector = label_selector
        self._client = KubeClient(CONNECT_SECONDS)

    def get(self, namespace: str, query: dict[str, str], read_seconds: float) -> Response:
        """An answer whose body is not read yet; the caller releases it. WatchError or ExpiredError when it is no 200."""
        path = f"/api/v1/namespaces/{quote(namespace)}/pods" if namespace else "/api/v1/pods"
        selected = list({"labelSelector": self._selector, **query}.items())
        response = self._client.request("GET", path, query=selected, read_seconds=read_seconds)
        if response.status == 200:
            return response
        response.response.release_conn()
        if response.status == 410:
            raise ExpiredError("the API server answered 410")
        hint = ": may this service account list and watch pods there?" if response.status == 403 else ""
        raise WatchError(f"the API server answered {response.status}{hint}")


class NamespaceWatch:
    """One namespace (or all), on a thread of its own. `on_change` is called there after each change and each failure."""

    def __init__(self, api: Api, namespace: str, on_change: Callable[[], None]) -> None:
        self._api = api
        self._namespace = namespace
        self._on_change = on_change
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pods: dict[tuple[str, str], Pod] = {}
        self._response: Response | None = None
        self._jitter = random.Random()
        self.tried = False
        """Whether the pods were listed, or could not be."""
        self.problem = "not listed yet"
        """Why what is known may be old; "" while it is current."""
        threading.Thread(target=self._run, name=f"pods of {namespace or 'all'}", daemon=True).start()

    def pods(self) -> list[Pod]:
        """The pods as last known."""
        with self._lock:
            return list(self._pods.values())

    def end(self) -> None:
        """Let the thread end, without waiting for it."""
        self._ended.set()
        with self._lock:
            response = self._response
        if response is not None:
            with contextlib.suppress(Exception):  # it may have ended by itself
                response.response.shutdown()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = BACKOFF_FIRST_SECONDS
        while not self._ended.is_set():
            try:
                version = self._list()
                backoff = BACKOFF_FIRST_SECONDS
                while not self._ended.wait(REPEAT_SECONDS):
                    version = self._follow(version)
            except ExpiredError:
                self._ended.wait(REPEAT_SECONDS)
            except Exception as error:  # noqa: BLE001  # a client of many layers; whatever it is, it is tried again
                self._failed(f"{type(error).__name__}: {error}".splitlines()[0][:300])
                self._ended.wait(backoff * self._jitter.uniform(0.5, 1.0))
                backoff = min(backoff * 2, BACKOFF_CAP_SECONDS)

    def _list(self) -> str:
        """Take over what is there now; the version from which on to watch."""
        pods: dict[tuple[str, str], Pod] = {}
        query = {"limit": str(LIST_LIMIT)}
        while True:
            response = self._api.get(self._namespace, query, LIST_SECONDS)
            page = json.loads(response.read())  # type: ignore[no-untyped-call]
            for manifest in page.get("items") or ():
                pod = project_pod(manifest)
                pods[pod.namespace, pod.name] = pod
            metadata = page["metadata"]
            if not metadata.get("continue"):
                break
            query = {**query, "continue": metadata["continue"]}
        with self._lock:
            self._pods = pods
        self._succeeded()
        return str(metadata["resourceVersion"])

    def _follow(self, version: str) -> str:
        """Apply changes until the server ends the watch; the version reached."""
        seconds = round(WATCH_SECONDS * self._jitter.uniform(0.7, 1.0))
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        response = self._api.get(self._namespace, query, seconds + WATCH_GRACE_SECONDS)
        with self._lock:
            self._response = response
        try:
            for line in _lines(response):
                if self._ended.is_set():
                    break
                version = self._apply(json.loads(line))
            return version
        finally:
            with self._lock:
                self._response = None
            response.response.close()

    def _apply(self, event: dict[str, Any]) -> str:
        kind, manifest = event["type"], event["object"]
        if kind == "ERROR":
            text = f"the API server ended the watch: {manifest.get('message') or manifest.get('reason')}"
            raise ExpiredError(text) if manifest.get("code") == 410 else WatchError(text)
        if kind != "BOOKMARK":
            pod = project_pod(manifest)
            with self._lock:
                if kind == "DELETED":
                    self._pods.pop((pod.namespace, pod.name), None)
                else:
                    self._pods[pod.namespace, pod.name] = pod
            self._on_change()
        return str(manifest["metadata"]["resourceVersion"])

    def _succeeded(self) -> None:
        if self.tried and self.problem:
            log.info("pods are watched again", extra=fields(watched=self._namespace or "all"))
        self.tried, self.problem = True, ""
        self._on_change()

    def _failed(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("pods are not watched", extra=fields(watched=self._namespace or "all", detail=problem))
        self.tried, self.problem = True, problem
        self._on_change()


def _lines(response: Response) -> Iterator[bytes]:
    """Whole lines of a stream as they arrive."""
    rest = b""
    for piece in response.response.stream(1 << 16, decode_content=True):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line for line in lines if line)
        if len(rest) > LINE_MAX_BYTES:
            raise WatchError("an event is longer than anything that the API server stores")


class PodMembers:
    """The pool's pods as a `discovery.MemberSource`."""

    def __init__(self, pool: Pool, settings: KubernetesDiscovery) -> None:
        self._pool = pool
        self._settings = settings
        self._api = Api(selector(pool.namespace, pool.name))
        self._file = NamespaceFile(Path(settings.namespaces_file))
        self._told = ""

    async def watch(self, metrics: RouterMetrics) -> AsyncIterator[Members]:
        """The fleet once every namespace was tried, then at each change."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        watches: dict[str, NamespaceWatch] = {}
        last: Members | None = None
        try:
            while True:
                self._follow_namespaces(watches, _on_loop(loop, changed.set))
                metrics.pod_watches_failing.set(sum(bool(watch.problem) for watch in watches.values()))
                members = self._members(watches)
                if members != last and all(watch.tried for watch in watches.values()):
                    last = members
                    yield members
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), NAMESPACES_PERIOD_SECONDS)
                    await asyncio.sleep(SETTLE_SECONDS)
                changed.clear()
        finally:
            for watch in watches.values():
                watch.end()

    def _follow_namespaces(self, watches: dict[str, NamespaceWatch], on_change: Callable[[], None]) -> None:
        """Watch where the pool may be used, and its own namespace for its agents."""
        self._file.refresh()
        if self._file.problem != self._told:
            self._told = self._file.problem
            if self._told:
                log.warning("allowed namespaces stay as they were", extra=fields(detail=self._told))
        allowed = self._file.allowed
        wanted = {EVERY_NAMESPACE} if allowed.everything else {self._pool.namespace, *allowed.names}
        for namespace in watches.keys() - wanted:
            watches.pop(namespace).end()
        for namespace in wanted - watches.keys():
            watches[namespace] = NamespaceWatch(self._api, namespace, on_change)

    def _members(self, watches: dict[str, NamespaceWatch]) -> Members:
        pods = [pod for watch in watches.values() for pod in watch.pods()]
        return members_of(
            pods, allowed=self._file.allowed, pool_namespace=self._pool.namespace, settings=self._settings
        )


def _on_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has the router
            loop.call_soon_threadsafe(action)

    return call
