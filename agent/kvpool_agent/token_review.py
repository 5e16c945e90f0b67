"""Asks the Kubernetes API server whose token an engine has brought.

Invariant: a call ends within CONNECT_SECONDS + READ_SECONDS and either gives the server's word or ReviewUnavailableError.
It blocks: call it on a thread.
"""

from __future__ import annotations

import json
from typing import Any

from kvpool_core.errors import KVPoolError
from kvpool_core.kube_client import KubeClient

CONNECT_SECONDS = 1.5
READ_SECONDS = 2.0
"""Together below the 5 s that an engine waits for its Welcome."""

_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"


class ReviewUnavailableError(KVPoolError):
    """The API server gave no verdict: away, overloaded, or this agent may not ask."""


class TokenReviews:
    """TokenReviews as the pod's own service account (or by the file that KUBECONFIG names)."""

    def __init__(self) -> None:
        self._client = KubeClient(CONNECT_SECONDS)

    def review(self, token: str, audience: str) -> dict[str, Any]:
        """The `status` of a TokenReview; ReviewUnavailableError when there is none."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        try:
            response = self._client.request("POST", _PATH, body=body, read_seconds=READ_SECONDS)
            answer: bytes = response.read()  # type: ignore[no-untyped-call]
        except Exception as error:  # a client of many layers: configuration, TLS, HTTP; none may end the agent
            raise ReviewUnavailableError(f"the API server gave no verdict: {_short(error)}") from error
        return _status(response.status, answer)


def _status(code: int, answer: bytes) -> dict[str, Any]:
    if code not in (200, 201):
        hint = ": may this service account create tokenreviews?" if code == 403 else ""
        raise ReviewUnavailableError(f"the API server answered a TokenReview with {code}{hint}")
    try:
        status = json.loads(answer)["status"]
    except (ValueError, KeyError, TypeError) as error:
        raise ReviewUnavailableError("the API server's answer is no TokenReview") from error
    if not isinstance(status, dict):
        raise ReviewUnavailableError("the API server's TokenReview has no status")
    return status


def _short(error: Exception) -> str:
    """The first line: urllib3 and the client write essays. Never the token: it is in the body, which none of them quote."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
