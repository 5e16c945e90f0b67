"""The election's record as a coordination/v1 Lease.

Invariant: a write goes through only if nobody wrote since the record was read.
"""

from __future__ import annotations

from kvpool_operator.kube import Kube
from kvpool_operator.kube_errors import ConflictError
from kvpool_operator.leadership import LEASE_SECONDS, LeaseRecord
from kvpool_operator.names import Manifest


class KubeLease:
    """A `leadership.LeaseStore`."""

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name

    def read(self) -> LeaseRecord | None:
        """The record; None when there is no Lease."""
        raw = self._kube.get("Lease", self._namespace, self._name)
        if raw is None:
            return None
        spec = raw.get("spec") or {}
        return LeaseRecord(
            holder=spec.get("holderIdentity") or "",
            renewed=spec.get("renewTime") or "",
            acquired=spec.get("acquireTime") or "",
            duration_seconds=int(spec.get("leaseDurationSeconds") or LEASE_SECONDS),
            transitions=int(spec.get("leaseTransitions") or 0),
            version=raw["metadata"]["resourceVersion"],
        )

    def create(self, record: LeaseRecord) -> bool:
        """Make the Lease."""
        try:
            self._kube.create(self._manifest(record))
        except ConflictError:
            return False
        return True

    def replace(self, record: LeaseRecord) -> bool:
        """Renew or take it."""
        try:
            self._kube.replace(self._manifest(record))
        except ConflictError:
            return False
        return True

    def _manifest(self, record: LeaseRecord) -> Manifest:
        version = {"resourceVersion": record.version} if record.version else {}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": self._namespace, "name": self._name, **version},
            "spec": {
                "holderIdentity": record.holder,
                "leaseDurationSeconds": record.duration_seconds,
                "acquireTime": record.acquired or None,
                "renewTime": record.renewed or None,
                "leaseTransitions": record.transitions,
            },
        }
