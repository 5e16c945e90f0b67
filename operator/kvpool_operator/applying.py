"""Makes the objects of a pool be as planned, and no others of its own.

Invariant: nothing foreign is touched; what is as it was after our last write is not written again; a refused object does not
keep the others from being applied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool_operator import names, reasons
from kvpool_operator.foreign_fields import claimed_fields
from kvpool_operator.kube import Kube
from kvpool_operator.kube_errors import (
    REFUSALS,
    AdmissionDownError,
    ConflictError,
    InvalidError,
    KubeError,
    NotFoundError,
)
from kvpool_operator.names import Manifest
from kvpool_operator.observed import Refusal
from kvpool_operator.ownership import Claim, claim, fingerprint, identity, is_made_for, title
from kvpool_operator.pool import Pool
from kvpool_operator.resources import OWNED_KINDS

REMADE = frozenset({"ConfigMap", "Secret", "PodDisruptionBudget", "RoleBinding", "ClusterRoleBinding"})
"""Kinds of which nobody misses an object for a moment."""
Raw = Mapping[str, Any]
Identity = tuple[str, str, str]
log = logging.getLogger("kvpool.operator.applying")


@dataclass(slots=True)
class Outcome:
    """What applying came to. `going`: names of objects that are waited for. `corrected`: edits by others that were put back."""

    refusals: list[Refusal] = field(default_factory=list)
    going: list[str] = field(default_factory=list)
    corrected: list[str] = field(default_factory=list)
    live: dict[Identity, Raw] = field(default_factory=dict)
    """The pool's own objects as they are now."""


class Applier:
    """Of one pool (by uid); remembers what it wrote last."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._written: dict[Identity, tuple[str, str]] = {}
        self._absent: set[Identity] = set()

    def apply(self, pool: Pool, planned: Iterable[Manifest]) -> Outcome:
        """Bring everything about; KubeError only when the API server is not there or this replica may not write."""
        outcome = Outcome(live=self._owned(pool))
        wanted = {identity(manifest): manifest for manifest in planned}
        for manifest in wanted.values():
            try:
                self._apply_as_it_is(pool, manifest, outcome)
            except NotFoundError as error:
                outcome.refusals.append(Refusal(reason=reasons.APPLY_REFUSED, message=str(error)))
            except (ConflictError, *REFUSALS) as error:
                outcome.refusals.append(_refused(manifest, error))
        self._prune(pool, wanted.keys(), outcome)
        return outcome

    def _owned(self, pool: Pool) -> dict[Identity, Raw]:
        labels = f"{names.POOL_UID_LABEL}={pool.uid}"
        found: dict[Identity, Raw] = {}
        for kind in OWNED_KINDS:
            namespace = None if kind.endswith("Binding") else pool.namespace
            for raw in self._kube.list_all(kind, namespace=namespace, labels=labels):
                found[identity(raw)] = raw
        return found

    def _apply_as_it_is(self, pool: Pool, manifest: Manifest, outcome: Outcome) -> None:
        """Once more when what was read is not there any more: deleted, or made anew by somebody, meanwhile."""
        try:
            self._apply_one(pool, manifest, outcome)
        except ConflictError:
            outcome.live.pop(identity(manifest), None)
            self._apply_one(pool, manifest, outcome)

    def _apply_one(self, pool: Pool, manifest: Manifest, outcome: Outcome) -> None:
        key = identity(manifest)
        live = outcome.live.get(key) or self._look(manifest)
        match claim(live["metadata"] if live else None, pool):
            case Claim.FOREIGN:
                outcome.refusals.append(_conflict(manifest))
            case Claim.GOING:
                outcome.going.append(title(manifest))
                outcome.live.pop(key, None)
            case Claim.LEFT_OVER if live is not None:
                self._kube.delete(key[0], key[1] or None, key[2], uid=live["metadata"]["uid"])
                outcome.going.append(title(manifest))
            case Claim.OURS if live is not None:
                outcome.live[key] = self._keep(manifest, live, outcome)
            case _:
                outcome.live[key] = self._write(manifest, None)

    def _look(self, manifest: Manifest) -> Raw | None:
        """An object that is not among our own: it is absent, foreign, or a Secret, which cannot be listed."""
        kind, namespace, name = identity(manifest)
        if kind != "Secret":
            return self._kube.get(kind, namespace or None, name)
        return self._kube.peek(kind, namespace, name)

    def _keep(self, manifest: Manifest, live: Raw, outcome: Outcome) -> Raw:
        key, wanted = identity(manifest), names.digest(manifest)
        before = self._written.get(key)
        if before == (wanted, fingerprint(live, manifest)):
            return live
        self._claim_fields(live)
        now = self._write_over(manifest, live["metadata"]["uid"])
        was_written = now["metadata"].get("resourceVersion") != live["metadata"].get("resourceVersion")
        if was_written and before is not None and before[0] == wanted:
            outcome.corrected.append(title(manifest))
        return now

    def _claim_fields(self, live: Raw) -> None:
        fields = claimed_fields(live)
        if fields is None:
            return
        kind, namespace, name = identity(live)
        meta = {"managedFields": fields, "resourceVersion": live["metadata"]["resourceVersion"]}
        self._kube.merge(kind, namespace or None, name, {"metadata": meta})

    def _write_over(self, manifest: Manifest, uid: str) -> Raw:
        """Some edits cannot be put back, such as `immutable`, or `minAvailable` beside our maxUnavailable."""
        try:
            return self._write(manifest, uid)
        except InvalidError:
            if manifest["kind"] not in REMADE:
                raise
        kind, namespace, name = identity(manifest)
        self._kube.delete(kind, namespace or None, name, uid=uid)
        return self._write(manifest, None)

    def _write(self, manifest: Manifest, uid: str | None) -> Raw:
        now = self._kube.apply(manifest, uid=uid)
        self._written[identity(manifest)] = (names.digest(manifest), fingerprint(now, manifest))
        self._absent.discard(identity(manifest))
        return now

    def _prune(self, pool: Pool, wanted: Iterable[Identity], outcome: Outcome) -> None:
        kept = set(wanted)
        for key in [key for key in outcome.live if key not in kept]:
            raw = outcome.live.pop(key)
            if not raw["metadata"].get("deletionTimestamp") and is_made_for(raw["metadata"], pool):
                self._delete(key, raw)
        secret = ("Secret", pool.namespace, names.valkey_name(pool))
        if secret not in kept and secret not in self._absent:
            meta = self._kube.peek(*secret)
            if meta is not None and claim(meta["metadata"], pool) is Claim.OURS:
                self._delete(secret, meta)
            self._absent.add(secret)

    def _delete(self, key: Identity, raw: Raw) -> None:
        kind, namespace, name = key
        log.info(
            "removing what is planned no more", extra={"data": {"kind": kind, "namespace": namespace, "name": name}}
        )
        self._kube.delete(kind, namespace or None, name, uid=raw["metadata"]["uid"])
        self._written.pop(key, None)


def _refused(manifest: Manifest, error: KubeError) -> Refusal:
    remedy = "allow what the API server names"
    if isinstance(error, AdmissionDownError):
        remedy = "an admission webhook that must be asked does not answer: bring it back, or let it fail open"
    return Refusal(reason=reasons.APPLY_REFUSED, message=f"{title(manifest)} is refused: {remedy}: {error}")


def _conflict(manifest: Manifest) -> Refusal:
    message = f"{title(manifest)} exists and is not this pool's: left alone; delete it, or give the pool another name"
    return Refusal(reason=reasons.NAME_CONFLICT, message=message)
