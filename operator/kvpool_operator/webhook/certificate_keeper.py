"""Keeps the Secret with the certificates, which both replicas share, and the bundle in the webhook configuration.

Invariant: what a replica serves is what the Secret holds: it is written with optimistic concurrency, the loser reads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from kvpool_operator.webhook.certificates import (
    CertificateError,
    Data,
    Serving,
    bundle,
    bundle_patch,
    renew,
    serving_of,
)
from kvpool_operator.webhook.contract import Manifest

logger = logging.getLogger(__name__)

TRIES: Final = 5
"""Two replicas: the loser of a write finds the winner's at the next try."""


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A Secret's data, decoded, and the version to replace."""

    data: Mapping[str, bytes]
    resource_version: str


class SecretStore(Protocol):
    """The one Secret, in the operator's namespace."""

    def read(self) -> StoredSecret | None:
        """None when there is none."""
        ...

    def create(self, data: Data) -> bool:
        """False when there is one by now."""
        ...

    def replace(self, data: Data, resource_version: str) -> bool:
        """False when it is no longer that version."""
        ...


class WebhookConfigurationStore(Protocol):
    """The chart's MutatingWebhookConfiguration."""

    def read(self) -> Manifest | None:
        """None when there is none."""
        ...

    def patch(self, operations: list[Manifest]) -> None:
        """Apply a JSON Patch."""
        ...


class CertificateKeeper:
    """`keep` in every replica, `publish` in the leader, both every minute."""

    def __init__(
        self, *, secrets: SecretStore, configuration: WebhookConfigurationStore, dns_names: Sequence[str]
    ) -> None:
        self._secrets = secrets
        self._configuration = configuration
        self._names = tuple(dns_names)

    def keep(self, now: datetime) -> Serving:
        """Renew what is due and return what to serve."""
        for _ in range(TRIES):
            stored = self._secrets.read()
            wanted = renew(stored.data if stored else {}, now, self._names)
            if wanted is None and stored is not None:
                return serving_of(stored.data)
            if wanted is not None and self._write(wanted, stored):
                logger.info("the webhook's certificates were renewed")
                return serving_of(wanted)
        raise CertificateError(f"the webhook's Secret changed under {TRIES} writes: does something else write it?")

    def _write(self, wanted: Data, stored: StoredSecret | None) -> bool:
        if stored is None:
            return self._secrets.create(wanted)
        return self._secrets.replace(wanted, stored.resource_version)

    def publish(self) -> bool:
        """Put the bundle into the webhook configuration; whether something was written."""
        stored, configuration = self._secrets.read(), self._configuration.read()
        if stored is None or configuration is None:
            return False
        patch = bundle_patch(configuration, bundle(stored.data))
        if patch:
            self._configuration.patch(patch)
            logger.info("the webhook configuration trusts the renewed authorities")
        return bool(patch)
