"""What can go wrong between operator and API server.

KubeError
├── NotFoundError       404: the object or its kind is not there
├── ConflictError       409: somebody else owns a field, changed the object first, or made another of that name
├── ForbiddenError      403: RBAC, a quota, an admission policy, or a namespace that is being deleted
├── InvalidError        400, 422: the API server does not take the object
├── UnavailableError    timeouts, broken connections, 429 and 5xx: try again
└── NotLeaderError      this replica leads no more: nothing was sent
"""

from __future__ import annotations

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
    """403."""


class InvalidError(KubeError):
    """400, 422."""


class UnavailableError(KubeError):
    """Try again later."""


class NotLeaderError(KubeError):
    """This replica may not write now."""


def error_of(status: int, what: str, message: str, reason: str) -> KubeError:
    """The error of an answer. `what`: the request, for people."""
    kinds: dict[int, type[KubeError]] = {
        400: InvalidError,
        403: ForbiddenError,
        404: NotFoundError,
        409: ConflictError,
        422: InvalidError,
    }
    kind = kinds.get(status, UnavailableError if status in (408, 429) or status >= 500 else KubeError)
    return kind(f"{what}: {status} {message}", reason=reason)
