"""When the webhook's certificates are made and renewed: decisions over a Secret's data and the time.

A new authority is published (`next.crt` in the bundle) for `PUBLISH_SECONDS` before it signs, and the former one stays in
the bundle until it expires. Invariant: what is served was signed by a certificate that the bundle already held.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from kvpool_core.errors import KVPoolError
from kvpool_operator.webhook import certificate_forms as forms
from kvpool_operator.webhook.certificate_forms import Pair
from kvpool_operator.webhook.contract import Manifest

CA_LIFE: Final = timedelta(days=730)
CA_RENEWED_BEFORE: Final = timedelta(days=180)
SERVING_LIFE: Final = timedelta(days=90)
SERVING_RENEWED_BEFORE: Final = timedelta(days=30)
PUBLISHED_BEFORE_USE: Final = timedelta(hours=1)
"""The leader publishes every minute; an hour also lets every API server's configuration cache follow."""

CA, CA_KEY, NEXT, NEXT_KEY, OLD = "ca.crt", "ca.key", "next.crt", "next.key", "old.crt"
SERVING, SERVING_KEY = "tls.crt", "tls.key"
KEYS: Final = frozenset({CA, CA_KEY, NEXT, NEXT_KEY, OLD, SERVING, SERVING_KEY})

Data = dict[str, bytes]


class CertificateError(KVPoolError):
    """The webhook's certificates cannot be kept; the message says what stands in the way."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What the server presents (PEM), and when it expires."""

    certificate: bytes
    key: bytes
    expires: datetime


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Names under which the API server calls a Service."""
    return (f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local")


def renew(data: Mapping[str, bytes], now: datetime, names: Sequence[str]) -> Data | None:
    """The Secret's data as it should be; None when it is so already."""
    ca, following, old = _authorities(data, now)
    serving = forms.read_pair(data.get(SERVING, b""), data.get(SERVING_KEY, b""))
    if serving is None or not _still_serves(serving, ca, now, names):
        serving = forms.make_serving(ca, names, now, SERVING_LIFE)
    wanted = {
        CA: ca.certificate_pem(),
        CA_KEY: ca.key_pem(),
        SERVING: serving.certificate_pem(),
        SERVING_KEY: serving.key_pem(),
        **({NEXT: following.certificate_pem(), NEXT_KEY: following.key_pem()} if following else {}),
        **({OLD: old} if old else {}),
    }
    return None if wanted == {key: value for key, value in data.items() if key in KEYS} else wanted


def _authorities(data: Mapping[str, bytes], now: datetime) -> tuple[Pair, Pair | None, bytes]:
    """(the one that signs, the one to come, the former one's certificate)."""
    ca = _unexpired(forms.read_pair(data.get(CA, b""), data.get(CA_KEY, b"")), now)
    following = _unexpired(forms.read_pair(data.get(NEXT, b""), data.get(NEXT_KEY, b"")), now)
    former = forms.read_certificate(data.get(OLD, b""))
    old = data[OLD] if former is not None and former.not_valid_after_utc > now else b""
    if ca is None:
        return following or forms.make_ca(now, CA_LIFE), None, old
    if following is None and ca.expires - now <= CA_RENEWED_BEFORE:
        following = forms.make_ca(now, CA_LIFE)
    elif following is not None and now - following.made >= PUBLISHED_BEFORE_USE:
        return following, None, ca.certificate_pem()
    return ca, following, old


def _unexpired(pair: Pair | None, now: datetime) -> Pair | None:
    return pair if pair is not None and pair.expires > now else None


def _still_serves(serving: Pair, ca: Pair, now: datetime, names: Sequence[str]) -> bool:
    return (
        min(serving.expires, ca.expires) - now > min(SERVING_RENEWED_BEFORE, (serving.expires - serving.made) / 3)
        and forms.is_issued_by(serving.certificate, ca.certificate)
        and forms.dns_names(serving.certificate) == set(names)
    )


def serving_of(data: Mapping[str, bytes]) -> Serving:
    """What to present."""
    pair = forms.read_pair(data[SERVING], data[SERVING_KEY])
    if pair is None:
        raise CertificateError("the webhook's Secret holds no certificate with its key: delete the Secret")
    return Serving(data[SERVING], data[SERVING_KEY], pair.expires)


def bundle(data: Mapping[str, bytes]) -> bytes:
    """All authorities that API servers have to trust, PEM."""
    return b"".join(data[name] for name in (CA, NEXT, OLD) if data.get(name))


def bundle_patch(configuration: Manifest, trusted: bytes) -> list[Manifest]:
    """JSON Patch that puts the bundle into every webhook of the configuration that has another; empty when none has."""
    text = base64.b64encode(trusted).decode()
    patch: list[Manifest] = []
    for index, webhook in enumerate(configuration.get("webhooks") or []):
        if webhook.get("clientConfig", {}).get("caBundle") != text:
            patch += [
                {"op": "test", "path": f"/webhooks/{index}/name", "value": webhook.get("name")},
                {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": text},
            ]
    return patch
