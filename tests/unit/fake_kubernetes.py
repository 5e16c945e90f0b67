"""A small API server on loopback: TokenReviews, and lists and watches of pods, in the real paths and stream format.

Stands where no real one runs. Invariant: what it answers has the shape of kube-apiserver 1.36 (checked against a real one in
`tests/cluster`); it serves from a thread of its own, so that blocking clients may call it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

Manifest = dict[str, Any]


class FakeKubernetes:
    """State may be changed from any thread through its methods. `down`: every request is cut off without an answer."""

    def __init__(self) -> None:
        self.down = False
        self.refuse_with = 0
        """Status of every answer while not 0."""
        self.forbidden: set[str] = set()
        """Namespaces of which nothing is told."""
        self.reviews: list[Manifest] = []
        self.review_status: Callable[[Manifest], Manifest] = lambda _spec: {"authenticated": False}
        self.lists = 0
        self.watches: list[dict[str, str]] = []
        self._pods: dict[tuple[str, str], Manifest] = {}
        self._log: list[tuple[int, str, Manifest]] = []
        self._version = 100
        self._oldest = 0
        self._streams: set[asyncio.Queue[bytes | None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-kubernetes")
        self._runner: web.AppRunner | None = None
        self.port = 0

    # --- pods ---------------------------------------------------------------------------------------------------------

    def put_pod(self, pod: Manifest) -> None:
        """Create or replace a pod and tell the watchers."""
        self._call(self._change, pod, False)

    def delete_pod(self, namespace: str, name: str) -> None:
        """Delete a pod and tell the watchers."""
        self._call(lambda: self._change(self._pods[namespace, name], True))

    def lose_pod(self, namespace: str, name: str) -> None:
        """Delete a pod without an event, and forget history: watchers of older versions get 410."""

        def lose() -> None:
            del self._pods[namespace, name]
            self._version += 10
            self._oldest = self._version
            self._log.clear()

        self._call(lose)

    def bookmark(self) -> None:
        """Send a bookmark of the newest version to every watcher."""
        line = _event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self._version)}})
        self._call(self._tell, line)

    def send_raw(self, line: bytes) -> None:
        """Send a line to every watcher."""
        self._call(self._tell, line)

    def end_watches(self) -> None:
        """End every stream, as a server does after `timeoutSeconds`."""
        self._call(self._tell, None)

    @property
    def watching(self) -> int:
        """Open streams."""
        return len(self._streams)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, port: int = 0) -> None:
        """Listen."""
        self._thread.start()
        self._call_async(self._listen(port))

    def stop(self) -> None:
        """End."""
        self._call_async(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def write_kubeconfig(self, path: Path) -> Path:
        """A file for KUBECONFIG."""
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        user = {"name": "u", "user": {"token": "the-agents-own"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        config = {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "x"}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **config}))
        return path

    async def _listen(self, port: int) -> None:
        app = web.Application()
        app.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", self._review)
        app.router.add_get("/api/v1/pods", self._serve_pods)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._serve_pods)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        for stream in self._streams:
            stream.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()

    def _call(self, action: Callable[..., object], *arguments: object) -> None:
        async def act() -> None:
            action(*arguments)

        self._call_async(act())

    def _call_async(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.down and request.transport is not None:
            request.transport.abort()
            return web.Response(status=500)
        status = 403 if request.match_info.get("namespace") in self.forbidden else self.refuse_with
        if status:
            return web.json_response({"kind": "Status", "code": status}, status=status)
        return None

    async def _review(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        assert (body["apiVersion"], body["kind"]) == ("authentication.k8s.io/v1", "TokenReview")
        assert request.headers["authorization"] == "Bearer the-agents-own"
        self.reviews.append(body["spec"])
        return web.json_response({**body, "status": self.review_status(body["spec"])}, status=201)

    async def _serve_pods(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        namespace = request.match_info.get("namespace", "")
        wanted = [pair.split("=", 1) for pair in request.query.get("labelSelector", "").split(",") if pair]

        def selects(pod: Manifest) -> bool:
            labels = pod["metadata"].get("labels", {})
            in_namespace = namespace in ("", pod["metadata"]["namespace"])
            return in_namespace and all(labels.get(key) == value for key, value in wanted)

        if request.query.get("watch") in ("true", "1"):
            return await self._watch(request, selects)
        self.lists += 1
        items = [pod for pod in self._pods.values() if selects(pod)]
        start = int(request.query.get("continue", "0"))
        end = start + int(request.query.get("limit", "1000000"))
        metadata = {"resourceVersion": str(self._version)} | ({"continue": str(end)} if end < len(items) else {})
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items[start:end]}
        )

    async def _watch(self, request: web.Request, selects: Callable[[Manifest], bool]) -> web.StreamResponse:
        self.watches.append(dict(request.query))
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        since = int(request.query["resourceVersion"])
        if since < self._oldest:
            await response.write(
                _event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            )
            return response
        stream: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, kind, pod in self._log:
            if version > since:
                stream.put_nowait(_event(kind, pod))
        self._streams.add(stream)
        try:
            while (line := await stream.get()) is not None:
                event = json.loads(line) if line.startswith(b"{") and line.endswith(b"}\n") else None
                if event is None or event["type"] not in ("ADDED", "MODIFIED", "DELETED") or selects(event["object"]):
                    await response.write(line)
        finally:
            self._streams.discard(stream)
        return response

    def _change(self, pod: Manifest, deleted: bool) -> None:
        self._version += 1
        key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        kind = "DELETED" if deleted else "MODIFIED" if key in self._pods else "ADDED"
        pod = {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self._version)}}
        if deleted:
            del self._pods[key]
        else:
            self._pods[key] = pod
        self._log.append((self._version, kind, pod))
        self._tell(_event(kind, pod))

    def _tell(self, line: bytes | None) -> None:
        for stream in self._streams:
            stream.put_nowait(line)


def _event(kind: str, obj: Manifest) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


@contextmanager
def running_kubernetes() -> Iterator[FakeKubernetes]:
    """A server that listens."""
    server = FakeKubernetes()
    server.start()
    try:
        yield server
    finally:
        server.stop()
