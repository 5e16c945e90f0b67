"""Runs the pod webhook in this process: server, certificate, dry runs.

Invariant: both replicas serve; only the leader publishes the certificate authority. Trouble here never ends the operator.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from kvpool_operator import names
from kvpool_operator.directory import Directory
from kvpool_operator.kube import Kube
from kvpool_operator.kube_errors import ConflictError, KubeError, UnavailableError
from kvpool_operator.names import Manifest
from kvpool_operator.settings import Settings
from kvpool_operator.webhook.certificate_keeper import CertificateKeeper, StoredSecret
from kvpool_operator.webhook.certificates import CertificateError, Data, service_names
from kvpool_operator.webhook.server import WebhookServer
from kvpool_operator.webhook.verdicts import VerdictCache

PERIOD_SECONDS = 60.0
FIRST_PERIOD_SECONDS = 2.0
"""Until the first certificate is served and published."""
SECRET_NAME = "kvpool-webhook"
CONFIGURATION_NAME = "kvpool.kvpool.io"

log = logging.getLogger("kvpool.operator.webhook")


class KubeSecretStore:
    """A `certificate_keeper.SecretStore`."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace

    def read(self) -> StoredSecret | None:
        """The Secret."""
        raw = self._kube.get("Secret", self._namespace, SECRET_NAME)
        if raw is None:
            return None
        data = {key: base64.b64decode(value) for key, value in (raw.get("data") or {}).items()}
        return StoredSecret(data=data, resource_version=raw["metadata"]["resourceVersion"])

    def create(self, data: Data) -> bool:
        """Make it."""
        return self._try(lambda: self._kube.create(self._manifest(data, "")))

    def replace(self, data: Data, resource_version: str) -> bool:
        """Replace that version of it."""
        return self._try(lambda: self._kube.replace(self._manifest(data, resource_version)))

    def _try(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except ConflictError:
            return False
        return True

    def _manifest(self, data: Data, version: str) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "namespace": self._namespace,
                "name": SECRET_NAME,
                "labels": {"app.kubernetes.io/name": "kvpool", names.MANAGED_BY_LABEL: names.FIELD_MANAGER},
                **({"resourceVersion": version} if version else {}),
            },
            "type": "Opaque",
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }


class KubeConfigurationStore:
    """A `certificate_keeper.WebhookConfigurationStore`."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    def read(self) -> Manifest | None:
        """The chart's configuration."""
        return self._kube.get("MutatingWebhookConfiguration", None, CONFIGURATION_NAME)

    def patch(self, operations: list[Manifest]) -> None:
        """Change it."""
        self._kube.json_patch("MutatingWebhookConfiguration", CONFIGURATION_NAME, operations)


def dry_run(kube: Kube, pod: Manifest) -> str:
    """Why the API server refuses a pod; "" when it admits it. UnavailableError when it does not say."""
    try:
        kube.create(pod, dry_run=True)
    except UnavailableError:
        raise
    except KubeError as error:
        return str(error)
    return ""


class WebhookService:
    """Server and its upkeep, each in a thread."""

    def __init__(self, kube: Kube, settings: Settings, directory: Directory, *, is_leading: Callable[[], bool]) -> None:
        """kube: with an open fence, for what both replicas write."""
        self._directory = directory
        self._is_leading = is_leading
        self._server = WebhookServer(
            find_pool=directory.find_pool,
            find_namespace=directory.find_namespace,
            verdicts=VerdictCache(lambda pod: dry_run(kube, pod)),
            port=settings.webhook_port,
        )
        self._keeper = CertificateKeeper(
            secrets=KubeSecretStore(kube, settings.namespace),
            configuration=KubeConfigurationStore(kube),
            dns_names=service_names(settings.service_name, settings.namespace),
        )
        self._stop = threading.Event()
        self._has_certificate = False

    @property
    def is_serving(self) -> bool:
        """Whether reviews are answered with a certificate that the API server knows."""
        return self._has_certificate and self._server.is_serving and self._directory.is_known.is_set()

    def serve(self) -> None:
        """Serve until `stop`."""
        asyncio.run(self._server.serve())

    def keep(self) -> None:
        """Keep the certificate fresh until `stop`."""
        while not self._stop.is_set():
            self._keep_certificate()
            self._stop.wait(PERIOD_SECONDS if self._has_certificate else FIRST_PERIOD_SECONDS)

    def publish(self) -> None:
        """This replica begins to lead: the configuration may lack the certificate authority."""
        try:
            self._keeper.publish()
        except (KubeError, CertificateError) as error:
            log.warning("cannot publish the webhook's CA", extra={"data": {"reason": str(error)}})

    def stop(self) -> None:
        """End both."""
        self._stop.set()
        self._server.stop()

    def _keep_certificate(self) -> None:
        try:
            self._server.use_certificate(self._keeper.keep(datetime.now(UTC)))
            self._has_certificate = True
        except (KubeError, CertificateError) as error:
            log.warning("cannot keep the webhook's certificate", extra={"data": {"reason": str(error)}})
            return
        if self._is_leading():
            self.publish()
