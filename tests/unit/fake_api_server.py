"""An API server over HTTP on loopback, as far as the operator uses one: for tests of what it reads and writes.

It keeps objects, checks uids and versions, selects by labels and records writes. It runs no controllers: tests play these.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from kubernetes import client

from kvpool_operator.fence import Fence, OpenFence
from kvpool_operator.kube import Kube, build_client
from kvpool_operator.resources import RESOURCES

Object = dict[str, Any]
Key = tuple[str, str, str]
KINDS = {(one.api_version, one.plural): kind for kind, one in RESOURCES.items()}
WITHOUT_GENERATION = {"ConfigMap", "Secret", "ServiceAccount", "RoleBinding", "ClusterRoleBinding", "Service", "Event"}


class Refusal(Exception):  # noqa: N818 (an answer)
    """What is answered in place of the object."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Write:
    """A write that was done: moment on the monotonic clock, method, kind, name, field manager."""

    at: float
    method: str
    kind: str
    name: str


@dataclass
class FakeApiServer:
    """The objects, and what tests set to see what happens."""

    objects: dict[Key, Object] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    on_write: Callable[[str, str, str], None] = lambda _method, _kind, _name: None
    """Called before each write; may raise Refusal."""
    on_read: Callable[[str], None] = lambda _kind: None
    """Called before each read of a kind; may raise Refusal."""
    on_dry_delete: Callable[[str, str], None] = lambda _kind, _name: None
    """Called for each deletion that is only tried; may raise Refusal."""
    on_dry_create: Callable[[Object], None] = lambda _manifest: None
    """Called for each creation that is only tried; may raise Refusal."""
    unreadable: frozenset[str] = frozenset({"Secret"})
    """Kinds that may not be read outside `readable_namespace`."""
    readable_namespace: str = "kvpool-system"
    refused_reads: dict[str, int] = field(default_factory=dict)
    """Status codes with which reads of kinds are answered."""
    applied: dict[Key, Object] = field(default_factory=dict)
    """What was last applied: others' fields stay, ours go when they are applied no more."""
    url: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    # --- for tests --------------------------------------------------------------------------------------------------

    def kube(self, fence: Fence | None = None) -> Kube:
        """A client."""
        return Kube(build_client(client.Configuration(host=self.url)), fence or OpenFence())

    def put(self, manifest: Object) -> Object:
        """Put an object in as if somebody else had; fills in what a server fills in."""
        with self.lock:
            meta = manifest.setdefault("metadata", {})
            key = (manifest["kind"], meta.get("namespace", ""), meta["name"])
            meta.setdefault("uid", f"uid-{next(self._numbers)}")
            self._store(key, manifest)
            return manifest

    def find(self, kind: str, name: str, namespace: str = "inference") -> Object | None:
        """An object."""
        place = namespace if RESOURCES[kind].is_namespaced else ""
        return self.objects.get((kind, place, name))

    def remove(self, kind: str, name: str, namespace: str = "inference") -> None:
        """Take an object out."""
        with self.lock:
            self.objects.pop((kind, namespace if RESOURCES[kind].is_namespaced else "", name), None)

    def names(self, kind: str) -> list[str]:
        """Names of all objects of a kind."""
        return sorted(key[2] for key in self.objects if key[0] == kind)

    def written(self, kind: str) -> int:
        """How often objects of a kind were written."""
        return sum(write.kind == kind for write in self.writes)

    # --- requests ---------------------------------------------------------------------------------------------------

    def handle(self, method: str, target: str, body: Any, headers: dict[str, str]) -> Object:
        """Answer a request."""
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        kind, namespace, name, subresource = _place(parts.path)
        with self.lock:
            if method == "GET":
                self.on_read(kind)
                self._may_read(kind, namespace)
                return self._get((kind, namespace, name)) if name else self._list(kind, namespace, query)
            name = name or body["metadata"].get("name") or body["metadata"]["generateName"]
            is_dry = query.get("dryRun") == "All" or (method == "DELETE" and "dryRun" in (body or {}))
            if is_dry and method == "DELETE":
                self.on_dry_delete(kind, name)
                return self._get((kind, namespace, name))
            if not is_dry:
                self.on_write(method, kind, name)
            answer = self._write(method, (kind, namespace, name), body, headers, subresource, is_dry=is_dry)
            if not is_dry:
                self.writes.append(Write(time.monotonic(), method, kind, name))
            return answer

    def _may_read(self, kind: str, namespace: str) -> None:
        if kind in self.refused_reads:
            raise Refusal(self.refused_reads[kind], "unable to parse requirement")
        if kind in self.unreadable and namespace != self.readable_namespace:
            raise Refusal(403, f"{kind} in {namespace!r} may not be read")

    def _write(
        self, method: str, key: Key, body: Any, headers: dict[str, str], subresource: str, *, is_dry: bool
    ) -> Object:
        if method == "POST":
            if is_dry:
                self.on_dry_create(body)
            if key in self.objects:
                raise Refusal(409, "AlreadyExists")
            if is_dry:
                return dict(body)
            return self._create(key, body)
        if method == "DELETE":
            return self._delete(key, body)
        if method == "PUT":
            present = self._get(key)
            if body["metadata"].get("resourceVersion") != present["metadata"]["resourceVersion"]:
                raise Refusal(409, "the object has been modified")
            return self._store(key, {**body, "metadata": {**present["metadata"], **body["metadata"]}})
        if "apply-patch" in headers.get("content-type", ""):
            return self._apply(key, body, subresource)
        present = self._get(key)
        if is_dry:
            return {"metadata": present["metadata"]}
        _check_version(present, body["metadata"])
        return self._store(key, _merged(present, body))

    def _create(self, key: Key, body: Object) -> Object:
        meta = {**body["metadata"], "uid": f"uid-{next(self._numbers)}"}
        return self._store(key, {**body, "metadata": meta})

    def _apply(self, key: Key, body: Object, subresource: str) -> Object:
        present = self.objects.get(key)
        uid = body["metadata"].get("uid")
        if present is None:
            if uid:
                raise Refusal(409, "the object with that uid is not there")
            self.applied[key] = body
            return self._create(key, body)
        if uid and uid != present["metadata"]["uid"]:
            raise Refusal(422, f"metadata.uid: Invalid value: {uid!r}: field is immutable")
        if subresource == "status":
            return self._store(key, {**present, "status": body["status"]})
        wanted = {name: part for name, part in body.items() if name != "metadata"}
        wanted = _applied(self.applied.get(key, {}), present, wanted)
        self.applied[key] = body
        meta = dict(present["metadata"])
        for part in ("labels", "annotations"):
            if part in body["metadata"]:
                meta[part] = {**meta.get(part, {}), **body["metadata"][part]}
        if "ownerReferences" in body["metadata"]:
            meta["ownerReferences"] = body["metadata"]["ownerReferences"]
        return self._store(key, {**present, **wanted, "metadata": meta})

    def _delete(self, key: Key, body: Object | None) -> Object:
        present = self._get(key)
        wanted = ((body or {}).get("preconditions") or {}).get("uid")
        if wanted and wanted != present["metadata"]["uid"]:
            raise Refusal(409, "uid mismatch")
        if present["metadata"].get("finalizers"):
            meta = {**present["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            return self._store(key, {**present, "metadata": meta})
        return self.objects.pop(key)

    def _store(self, key: Key, value: Object) -> Object:
        before = self.objects.get(key)
        meta = dict(value["metadata"])
        if before is not None and _same(before, value):
            return before
        meta["resourceVersion"] = str(next(self._numbers))
        if key[0] not in WITHOUT_GENERATION:
            changed = before is None or before.get("spec") != value.get("spec")
            meta["generation"] = (before["metadata"].get("generation", 0) if before else 0) + changed
        self.objects[key] = {**value, "metadata": meta}
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and key[0] == "KVCachePool":
            self.objects.pop(key)
        return {**value, "metadata": meta}

    def _get(self, key: Key) -> Object:
        if key not in self.objects:
            raise Refusal(404, f"{key} not found")
        return self.objects[key]

    def _list(self, kind: str, namespace: str, query: dict[str, str]) -> Object:
        found = [
            one
            for key, one in sorted(self.objects.items())
            if key[0] == kind
            and namespace in ("", key[1])
            and _selected(one["metadata"].get("labels") or {}, query.get("labelSelector", ""))
        ]
        return {"items": found, "metadata": {}}


def _place(path: str) -> tuple[str, str, str, str]:
    """(kind, namespace, name, subresource)."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    version, rest = (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    rest += [""] * (3 - len(rest))
    return KINDS[version, rest[0]], namespace, rest[1], rest[2]


def _selected(labels: dict[str, str], selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        key, sign, value = term.partition("=")
        if key.endswith("!"):
            matches = labels.get(key[:-1]) != value
        else:
            matches = labels.get(key) == value if sign else key in labels
        if not matches:
            return False
    return True


def _check_version(present: Object, meta: Object) -> None:
    version = meta.get("resourceVersion")
    if version and version != present["metadata"]["resourceVersion"]:
        raise Refusal(409, "the object has been modified")


def _merged(present: Object, patch: Object) -> Object:
    merged = dict(present)
    for key, value in patch.items():
        merged[key] = _merged(merged.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


ATOMIC = frozenset({"nodeSelector", "selector", "annotations", "labels"})
"""Maps that are applied as a whole."""


def _applied(former: Object, present: Object, wanted: Object) -> Object:
    """Server-side apply, by one manager among others; lists are atomic here."""
    merged = {key: value for key, value in present.items() if key in wanted or key not in former}
    for key, value in wanted.items():
        below = present.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and key not in ATOMIC:
            last = former.get(key)
            merged[key] = _applied(last if isinstance(last, dict) else {}, below, value)
        else:
            merged[key] = value
    return merged


def _same(before: Object, after: Object) -> bool:
    def plain(value: Object) -> Object:
        meta = {key: part for key, part in value["metadata"].items() if key not in ("resourceVersion", "generation")}
        return {**value, "metadata": meta}

    return plain(before) == plain(after)


@contextmanager
def fake_api_server() -> Iterator[FakeApiServer]:
    """A server that runs."""
    state = FakeApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            headers = {key.lower(): value for key, value in self.headers.items()}
            try:
                code, answer = 200, state.handle(self.command, self.path, body, headers)
            except Refusal as refusal:
                code, answer = refusal.code, {"kind": "Status", "message": str(refusal), "reason": str(refusal)}
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 (the library's names)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), name="fake-api-server", daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
