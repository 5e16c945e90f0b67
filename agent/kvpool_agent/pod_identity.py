"""Which pod an engine's token belongs to, by what the API server says of it.

Pure. Invariant: a PodIdentity comes only from a review that authenticated the token for our audience and names its pod;
what a token says of itself is believed in nothing but how soon it ends.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool_core.wire import NAMESPACE_NOT_ALLOWED

_USERNAME_PREFIX = "system:serviceaccount:"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"

TOKEN_MISSING = "TokenMissing"
TOKEN_REJECTED = "TokenRejected"
TOKEN_UNBOUND = "TokenUnbound"


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """A pod of the cluster."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an engine is not let in; goes to it as `Refused`."""

    code: str
    message: str


def audience_of(namespace: str, pool: str) -> str:
    """The audience that tokens for this pool have; nobody else accepts them, and they open nothing else."""
    return f"kvpool.io/{namespace}/{pool}"


def read_review(status: Mapping[str, Any], audience: str) -> PodIdentity | Refusal:
    """What a TokenReview's status says (authentication.k8s.io/v1, asked for `audience`)."""
    if not status.get("authenticated"):
        return Refusal(
            TOKEN_REJECTED, f"the API server does not accept the token: {status.get('error') or 'no reason given'}"
        )
    if audience not in (status.get("audiences") or ()):
        return Refusal(TOKEN_REJECTED, f"the token is not for the audience {audience}: project one that is")
    user = status.get("user") or {}
    username = str(user.get("username", ""))
    namespace, colon, _account = username.removeprefix(_USERNAME_PREFIX).partition(":")
    if not username.startswith(_USERNAME_PREFIX) or not namespace or not colon:
        return Refusal(TOKEN_REJECTED, f"{username or 'the user'} is no service account: use a projected token")
    extra = user.get("extra") or {}
    name, uid = _only(extra.get(_POD_NAME)), _only(extra.get(_POD_UID))
    if not name or not uid:
        return Refusal(TOKEN_UNBOUND, "the token is bound to no pod: project it into the engine's pod")
    return PodIdentity(namespace, name, uid)


def not_allowed(pod: PodIdentity) -> Refusal:
    """The pod's namespace may not use the pool."""
    return Refusal(
        NAMESPACE_NOT_ALLOWED,
        f"namespace {pod.namespace} may not use this pool: add it to the pool's spec.allowedNamespaces",
    )


def token_expiry(token: str) -> float | None:
    """When the token ends by its own word (Unix seconds), None when it does not say: bounds how long a review is kept."""
    try:
        _header, payload, _signature = token.split(".")
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        expiry = claims["exp"]
        return float(expiry) if isinstance(expiry, int | float) else None
    except (ValueError, KeyError, TypeError, binascii.Error, OverflowError, RecursionError):
        return None


def _only(values: object) -> str:
    return values[0] if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str) else ""
