"""How agent and router reach the Kubernetes API server. The only module of theirs that imports `kubernetes`.

Invariant: importing this module costs nothing; the client is large, and neither needs it outside Kubernetes.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.rest import RESTResponse

    Response: TypeAlias = RESTResponse

Query = list[tuple[str, str]]


def load_client() -> None:
    """Import the client now, so that no request waits for it: it takes seconds where the processor is busy."""
    importlib.import_module("kubernetes.client.api_client")
    importlib.import_module("kubernetes.config")


class KubeClient:
    """Requests as the pod's own service account, or by the file that KUBECONFIG names; for use from several threads.

    It connects at the first request and never tries again by itself: its users know better when.
    """

    def __init__(self, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._lock = threading.Lock()
        self._client: ApiClient | None = None

    def request(
        self, method: str, path: str, *, read_seconds: float, query: Query | None = None, body: object = None
    ) -> Response:
        """An answer of any status whose body is not read yet. Raises what the client's many layers raise."""
        client = self._connected()
        headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if body is not None else {})
        method, url, headers, content, _ = client.param_serialize(
            method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        return client.call_api(method, url, headers, content, _request_timeout=(self._connect_seconds, read_seconds))

    def _connected(self) -> ApiClient:
        with self._lock:
            if self._client is None:
                self._client = _connect()
            return self._client


def _connect() -> ApiClient:
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.configuration import Configuration
    from kubernetes.config import load_incluster_config, load_kube_config

    configuration = Configuration()
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig:
        load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call]
    else:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.retries = False
    return ApiClient(configuration)
