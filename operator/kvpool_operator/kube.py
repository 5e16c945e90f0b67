"""The API server: the operator's only door to it.

Invariant: every request has a timeout, every write passes the fence, and every failure is a KubeError. Objects come and go
as plain dictionaries; what is read of them is `projections`' business.
"""

# kubernetes is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import client, config
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from kvpool_operator.fence import Fence, check_before_send, sending_under, write_timeout
from kvpool_operator.kube_errors import (
    ConflictError,
    InvalidError,
    KubeError,
    NotFoundError,
    NotLeaderError,
    UnavailableError,
    error_of,
)
from kvpool_operator.names import FIELD_MANAGER, Manifest
from kvpool_operator.resources import RESOURCES

READ_TIMEOUT_SECONDS = 15.0
WRITE_TIMEOUT_SECONDS = 8.0
DRY_RUN_TIMEOUT_SECONDS = 1.25
"""Of a creation that is tried only: two of them fit into the webhook's deadline of 3 s, a third only after quick ones."""
PAGE_SIZE = 500
CONNECTIONS = 32
"""Kept open: workers, the leadership's and the webhook's threads together."""
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_JSON_PATCH = "application/json-patch+json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

Raw = dict[str, Any]
log = logging.getLogger("kvpool.operator.kube")


class _FencedConnection(HTTPConnection):
    """Looks at the fence right before it sends."""

    def send(self, data: Any) -> None:
        """As http.client's."""
        check_before_send()
        super().send(data)


class _FencedTlsConnection(HTTPSConnection):
    """The same over TLS."""

    def send(self, data: Any) -> None:
        """As http.client's."""
        check_before_send()
        super().send(data)


class _FencedPool(HTTPConnectionPool):
    ConnectionCls = _FencedConnection


class _FencedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _FencedTlsConnection


def connect() -> client.ApiClient:
    """A client of the cluster that this process runs in, or that KUBECONFIG names; KubeError when there is neither."""
    settings = client.Configuration()
    try:
        if os.environ.get("KUBECONFIG"):
            config.load_kube_config(client_configuration=settings)
        else:
            config.load_incluster_config(client_configuration=settings)
    except config.ConfigException as error:
        raise KubeError(
            f"no cluster to talk to: {error}: run in a pod with a service account, or set KUBECONFIG"
        ) from error
    return build_client(settings)


def build_client(settings: client.Configuration) -> client.ApiClient:
    """A client whose connections look at the fence."""
    settings.connection_pool_maxsize = CONNECTIONS
    settings.retries = urllib3.Retry(connect=1, read=0, redirect=0, status=0, other=0)
    api = client.ApiClient(settings)
    api.rest_client.pool_manager.pool_classes_by_scheme = {"http": _FencedPool, "https": _FencedTlsPool}
    return api


class Kube:
    """Reads and fenced writes. Thread-safe."""

    def __init__(self, api: client.ApiClient, fence: Fence) -> None:
        self._api = api
        self._fence = fence

    # --- reading ----------------------------------------------------------------------------------------------------

    def get(self, kind: str, namespace: str | None, name: str) -> Raw | None:
        """An object; None when it is not there."""
        try:
            return self._read(RESOURCES[kind].path(namespace, name), {})
        except NotFoundError:
            return None

    def list_all(self, kind: str, *, namespace: str | None = None, labels: str = "", fields: str = "") -> Iterator[Raw]:
        """Every object that both selectors select, page by page; `namespace` None: everywhere."""
        query = {"limit": str(PAGE_SIZE), "labelSelector": labels, "fieldSelector": fields, "continue": ""}
        resource = RESOURCES[kind]
        while True:
            page = self._read(resource.path(namespace), {key: value for key, value in query.items() if value})
            for item in page.get("items") or ():
                # items of a list lack them
                yield {"apiVersion": resource.api_version, "kind": kind, **item}
            query["continue"] = (page.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return

    def peek(self, kind: str, namespace: str, name: str) -> Raw | None:
        """Metadata of an object that may not be read: an empty patch, tried only, is answered with it. None: not there."""
        path = RESOURCES[kind].path(namespace, name)
        try:
            return self._send(
                "PATCH", path, body={}, content_type=_MERGE_PATCH, query={"dryRun": "All"}, accept=_METADATA_ONLY
            )
        except NotFoundError:
            return None

    # --- writing ----------------------------------------------------------------------------------------------------

    def apply(self, manifest: Manifest, *, uid: str | None = None, subresource: str = "") -> Raw:
        """Server-side apply; other managers' values of our fields are overruled.

        uid: the object must be that one (ConflictError otherwise); None: whether or not it exists.
        """
        meta = manifest["metadata"]
        body = manifest if uid is None else {**manifest, "metadata": {**meta, "uid": uid}}
        path = RESOURCES[manifest["kind"]].path(meta.get("namespace"), meta["name"], subresource)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            return self._send("PATCH", path, body=body, content_type=_APPLY_PATCH, query=query)
        except InvalidError as error:
            if uid is not None and "metadata.uid" in str(
                error
            ):  # 409 is the answer only where there is no object at all
                raise ConflictError(str(error), reason=error.reason) from error
            raise

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Raw:
        """Create; ConflictError when the name is taken. `dry_run`: only ask whether it would be admitted."""
        path = RESOURCES[manifest["kind"]].path(manifest["metadata"].get("namespace"))
        query = {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        seconds = DRY_RUN_TIMEOUT_SECONDS if dry_run else WRITE_TIMEOUT_SECONDS
        return self._send("POST", path, body=manifest, query=query, timeout_seconds=seconds)

    def replace(self, manifest: Manifest) -> Raw:
        """Replace what has the manifest's resourceVersion; ConflictError when it changed meanwhile."""
        meta = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(meta.get("namespace"), meta["name"])
        return self._send("PUT", path, body=manifest, query={"fieldManager": FIELD_MANAGER})

    def merge(self, kind: str, namespace: str | None, name: str, patch: Manifest) -> Raw:
        """A JSON merge patch."""
        path = RESOURCES[kind].path(namespace, name)
        query = {"fieldManager": FIELD_MANAGER}
        return self._send("PATCH", path, body=patch, content_type=_MERGE_PATCH, query=query)

    def json_patch(self, kind: str, name: str, operations: list[Manifest]) -> Raw:
        """A JSON patch of a cluster-scoped object."""
        query = {"fieldManager": FIELD_MANAGER}
        path = RESOURCES[kind].path(None, name)
        return self._send("PATCH", path, body=operations, content_type=_JSON_PATCH, query=query)

    def delete(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        *,
        uid: str,
        grace_seconds: int | None = None,
        dry_run: bool = False,
    ) -> bool:
        """Delete exactly this object and, in the background, what it owns; whether it was still there.

        `dry_run`: only ask whether it would be admitted.
        """
        body: Manifest = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if dry_run:
            body["dryRun"] = ["All"]
        try:
            self._send("DELETE", RESOURCES[kind].path(namespace, name), body=body)
        except NotFoundError:
            return False
        return True

    # --- requests ---------------------------------------------------------------------------------------------------

    def _read(self, path: str, query: Mapping[str, str]) -> Raw:
        return self._request("GET", path, query=query, timeout_seconds=READ_TIMEOUT_SECONDS)

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: object,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        accept: str = "application/json",
        timeout_seconds: float = WRITE_TIMEOUT_SECONDS,
    ) -> Raw:
        timeout = write_timeout(self._fence, timeout_seconds)
        with sending_under(self._fence):
            return self._request(
                method,
                path,
                body=body,
                query=query or {},
                timeout_seconds=timeout,
                headers={"Content-Type": content_type, "Accept": accept},
            )

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        timeout_seconds: float,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> Raw:
        what = f"{method} {path}"
        target = f"{path}?{urlencode(query)}" if query else path
        asked = headers or {"Accept": "application/json"}
        method, url, sent, _, _ = self._api.param_serialize(
            method, target, header_params=asked, auth_settings=["BearerToken"]
        )
        try:
            answer = self._api.rest_client.request(
                method, url, headers=sent, body=body, _request_timeout=timeout_seconds
            )
            data = answer.read()
        except NotLeaderError:
            raise
        except (urllib3.exceptions.HTTPError, client.ApiException, OSError) as error:
            raise UnavailableError(f"{what}: {error}") from error
        return _decode(what, answer.status, data)


def _decode(what: str, status: int, data: bytes) -> Raw:
    try:
        decoded = json.loads(data) if data else {}
    except ValueError:
        decoded = {"message": data[:200].decode(errors="replace")}
    if 200 <= status < 300:
        return decoded if isinstance(decoded, dict) else {}
    raise error_of(status, what, str(decoded.get("message", "")), str(decoded.get("reason", "")))
