"""What can go wrong between operator and API server.

KubeError
├── NotFoundError       404: the object or its kind is not there
├── ConflictError       409: somebody else owns a field, changed the object first, or made another of that name
├── ForbiddenError      403: RBAC, a quota, a namespace that is being deleted; any code: denied by admission
├── InvalidError        400, 413, 422: the API server does not take the object
├── UnavailableError    timeouts, broken connections, 429 and 5xx: try again
│   └── AdmissionDownError  the API server is there, an admission webhook that it must ask is not: this object cannot be written
└── NotLeaderError      this replica leads no more: nothing was sent
"""

from __future__ import annotations

import re

from kvpool_core.errors import KVPoolError


class KubeError(KVPoolError):
    """A request to the API server that was not answered with success. `reason`: the API server's word."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class NotFoundError(KubeError):
    """404."""


class ConflictError(KubeError):
    """409."""


class ForbiddenError(KubeError):
    """403, or denied by admission."""


class InvalidError(KubeError):
    """400, 413, 422."""


class UnavailableError(KubeError):
    """Try again later."""


class AdmissionDownError(UnavailableError):
    """A webhook with `failurePolicy: Fail` does not answer."""


class NotLeaderError(KubeError):
    """This replica may not write now."""


REFUSALS = (ForbiddenError, InvalidError, AdmissionDownError)
"""The API server works and does not take this request: other objects and status can be written all the same."""
_DENIED = re.compile(r"\bdenied (the )?request\b")
"""The API server's words where a webhook or a policy refuses, which choose the status code themselves."""
_ADMISSION_DOWN = re.compile(r"\bfailed calling webhook\b")


def error_of(status: int, what: str, message: str, reason: str) -> KubeError:
    """The error of an answer. `what`: the request, for people."""
    if _DENIED.search(message):
        return ForbiddenError(f"{what}: {status} {message}", reason=reason)
    if _ADMISSION_DOWN.search(message):
        return AdmissionDownError(f"{what}: {status} {message}", reason=reason)
    kinds: dict[int, type[KubeError]] = {
        400: InvalidError,
        403: ForbiddenError,
        404: NotFoundError,
        409: ConflictError,
        413: InvalidError,
        422: InvalidError,
    }
    kind = kinds.get(status, UnavailableError if status in (408, 429) or status >= 500 else KubeError)
    return kind(f"{what}: {status} {message}", reason=reason)
