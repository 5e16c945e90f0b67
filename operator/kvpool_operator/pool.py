"""A KVCachePool as the operator works with it.

Invariant: a `Pool` that exists holds what the CRD's schema allows; anything else is a PoolError naming the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool_core.errors import KVPoolError

_QUANTITY = re.compile(r"([1-9][0-9]{0,8})(Mi|Gi|Ti)")
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


class PoolError(KVPoolError):
    """A KVCachePool that this operator does not understand: its CRD is another release's."""


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """metav1.LabelSelector: every requirement must hold."""

    match_labels: tuple[tuple[str, str], ...] = ()
    match_expressions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """(key, operator, values)."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is selected."""
        return all(labels.get(key) == value for key, value in self.match_labels) and all(
            _holds(key, operator, values, labels) for key, operator, values in self.match_expressions
        )


def _holds(key: str, operator: str, values: tuple[str, ...], labels: Mapping[str, str]) -> bool:
    match operator:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedNamespaces:
    """Who may opt in. `kind`: Same | Selector | All."""

    kind: str = "Same"
    selector: LabelSelector = LabelSelector()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """Where and how agents run. Passed on as they are: tolerations, affinity, resources."""

    node_selector: tuple[tuple[str, str], ...]
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = field(default_factory=dict)
    priority_class_name: str = ""
    image: str = ""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    cpu_request: str = ""
    cpu_limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedValkey:
    """A Valkey cluster that the operator runs."""

    shards: int
    memory_per_shard_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalValkey:
    """A Valkey that somebody else runs. `deletion_policy`: Purge | Retain."""

    endpoints: tuple[str, ...]
    key_prefix: str = ""
    secret_name: str = ""
    deletion_policy: str = "Purge"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """The router's Service."""

    kind: str = "ClusterIP"
    port: int = 80
    annotations: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """`mode`: Proxy | Disabled."""

    mode: str = "Proxy"
    replicas: int = 2
    service: ServiceSpec = ServiceSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One KVCachePool."""

    namespace: str
    name: str
    uid: str
    generation: int
    agent: AgentSpec
    capacity: str
    managed: ManagedValkey | None = None
    external: ExternalValkey | None = None
    routing: Routing = Routing()
    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    deletion_timestamp: str = ""
    """RFC 3339; "" while it lives."""
    finalizers: tuple[str, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    status: dict[str, Any] = field(default_factory=dict)
    """As last written; only compared and carried on."""

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name)."""
        return self.namespace, self.name

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena on each node."""
        return parse_quantity(self.capacity, "spec.ram.capacityPerNode")

    @property
    def is_paused(self) -> bool:
        """Whether `kvpool.io/reconcile: paused` keeps the operator's hands off."""
        return ("kvpool.io/reconcile", "paused") in self.annotations

    @property
    def must_purge(self) -> bool:
        """Whether keys must be removed from an external Valkey when the pool goes."""
        return self.external is not None and self.external.deletion_policy == "Purge"


def parse_quantity(text: object, where: str) -> int:
    """Bytes of a memory quantity in the CRD's form."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise PoolError(f"{where}: {text!r} is not a quantity: use a whole number with Mi, Gi or Ti, such as 64Gi")
    return int(match[1]) * _UNITS[match[2]]


def parse_pool(manifest: Mapping[str, Any]) -> Pool:
    """A pool as the API server holds it, defaults filled in; PoolError when a part is missing or wrong."""
    meta = manifest.get("metadata") or {}
    spec = manifest.get("spec") or {}
    try:
        return _parse(meta, spec, manifest.get("status") or {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        where = f"{meta.get('namespace')}/{meta.get('name')}"
        raise PoolError(
            f"KVCachePool {where}: spec is not as this operator's CRD has it ({error}): apply the CRD of this release"
        ) from error


def _parse(meta: Mapping[str, Any], spec: Mapping[str, Any], status: dict[str, Any]) -> Pool:
    capacity = spec["ram"]["capacityPerNode"]
    parse_quantity(capacity, "spec.ram.capacityPerNode")
    valkey = spec.get("valkey") or {}
    return Pool(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=int(meta.get("generation", 0)),
        agent=_agent(spec["agent"]),
        capacity=capacity,
        managed=_managed(valkey["managed"]) if "managed" in valkey else None,
        external=_external(valkey["external"]) if "external" in valkey else None,
        routing=_routing(spec.get("routing") or {}),
        allowed_namespaces=_allowed(spec.get("allowedNamespaces") or {}),
        deletion_timestamp=meta.get("deletionTimestamp") or "",
        finalizers=tuple(meta.get("finalizers") or ()),
        annotations=_pairs(meta.get("annotations")),
        status=status,
    )


def _agent(raw: Mapping[str, Any]) -> AgentSpec:
    resources = raw.get("resources") or {}
    return AgentSpec(
        node_selector=_pairs(raw["nodeSelector"]),
        tolerations=tuple(raw.get("tolerations") or ()),
        affinity=dict(raw.get("affinity") or {}),
        priority_class_name=raw.get("priorityClassName") or "",
        image=raw.get("image") or "",
        image_pull_policy=raw.get("imagePullPolicy") or "IfNotPresent",
        image_pull_secrets=tuple(entry["name"] for entry in raw.get("imagePullSecrets") or ()),
        cpu_request=str((resources.get("requests") or {}).get("cpu", "")),
        cpu_limit=str((resources.get("limits") or {}).get("cpu", "")),
    )


def _managed(raw: Mapping[str, Any]) -> ManagedValkey:
    memory = parse_quantity(raw["memoryPerShard"], "spec.valkey.managed.memoryPerShard")
    return ManagedValkey(shards=int(raw.get("shards", 3)), memory_per_shard_bytes=memory)


def _external(raw: Mapping[str, Any]) -> ExternalValkey:
    return ExternalValkey(
        endpoints=tuple(raw["endpoints"]),
        key_prefix=raw.get("keyPrefix") or "",
        secret_name=(raw.get("authSecretRef") or {}).get("name", ""),
        deletion_policy=raw.get("deletionPolicy") or "Purge",
    )


def _routing(raw: Mapping[str, Any]) -> Routing:
    service = raw.get("service") or {}
    return Routing(
        mode=raw.get("mode") or "Proxy",
        replicas=int(raw.get("replicas", 2)),
        service=ServiceSpec(
            kind=service.get("type") or "ClusterIP",
            port=int(service.get("port", 80)),
            annotations=_pairs(service.get("annotations")),
        ),
    )


def _allowed(raw: Mapping[str, Any]) -> AllowedNamespaces:
    selector = raw.get("selector") or {}
    expressions: Sequence[Mapping[str, Any]] = selector.get("matchExpressions") or ()
    return AllowedNamespaces(
        kind=raw.get("from") or "Same",
        selector=LabelSelector(
            match_labels=_pairs(selector.get("matchLabels")),
            match_expressions=tuple(
                (entry["key"], entry["operator"], tuple(entry.get("values") or ())) for entry in expressions
            ),
        ),
    )


def _pairs(mapping: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((mapping or {}).items()))
