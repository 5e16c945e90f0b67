"""Memory and resources that injection adds: page tables of the mapped arena, and what the init container asks for. Pure.

An engine process that maps the arena with 4 KiB pages needs 2 MiB of page tables per GiB, charged to its own container
(DESIGN section 6). Invariant: the pod keeps its QoS class, asks for no more than before but those page tables, and is not
asked more for than a node has.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.engine_command import Engine
from kvpool_operator.webhook.placement import may_land, may_land_now
from kvpool_operator.webhook.views import NamespaceFacts, PoolView

MIB = 1 << 20
GIB = 1 << 30
PAGE_TABLES_PER_GIB = 2 * MIB
MOST_BYTES = (1 << 63) - 1
"""The largest quantity there is."""
COPIED = ("cpu", "memory", "ephemeral-storage")

_QUANTITY = re.compile(r"(\+?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)([numkMGTPE]?|[KMGTPE]i)")
_SUFFIXES: dict[str, Decimal | int] = {
    "n": Decimal(10) ** -9, "u": Decimal(10) ** -6, "m": Decimal(10) ** -3,
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}  # fmt: skip


def memory_bytes(text: object) -> int | None:
    """Bytes of a Kubernetes quantity; None where it is none, or not whole bytes."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        return None
    amount = Decimal(found[1]) * _SUFFIXES[found[2]]
    return int(amount) if amount == amount.to_integral_value() and amount <= MOST_BYTES else None


def page_table_bytes(engine: Engine, pool: PoolView) -> int:
    """For all worker processes of the engine, in whole MiB."""
    if pool.huge_pages:
        return 0
    workers = (engine.flags.number("--tensor-parallel-size", "-tp", default=1) or 1) * (
        engine.flags.number("--data-parallel-size-local", "-dpl", default=0)
        or engine.flags.number("--data-parallel-size", "-dp", default=1)
        or 1
    )
    return workers * math.ceil(pool.capacity_bytes * PAGE_TABLES_PER_GIB / GIB / MIB) * MIB


def raise_memory(pod: Manifest, engine: Engine, pool: PoolView, namespace: NamespaceFacts) -> None:
    """Raise the engine's memory limit, and its request where that is the same (a Guaranteed pod stays so).

    Left alone: no limit; a limit of the whole pod; a namespace that bounds memory, where more might be refused; a request
    that would then fit no node that is known: the pod would wait for ever.
    """
    container: Manifest = pod["spec"]["containers"][engine.index]
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    limit, request = memory_bytes(limits.get("memory")), memory_bytes(requests.get("memory"))
    extra = page_table_bytes(engine, pool)
    if limit is None or not extra or namespace.bounds_memory or pod["spec"].get("resources"):
        return
    is_request_raised = request in (None, limit)
    if limit + extra > MOST_BYTES or (is_request_raised and not _fits_a_node(pod, pool, extra)):
        return
    limits["memory"] = _quantity(limit + extra)
    if request == limit:
        requests["memory"] = limits["memory"]


def _fits_a_node(pod: Manifest, pool: PoolView, extra: int) -> bool:
    """Whether some node is known to have that much more, of those that have room for the pod as it came.

    Nodes where the pod may land now come first; where there are none, those that will be well again.
    """
    needed = _requested_bytes(pod["spec"])
    now, later = (
        [node.memory_bytes for node in pool.nodes if lands(pod, node) and node.memory_bytes >= needed]
        for lands in (may_land_now, may_land)
    )
    return any(room >= needed + extra for room in now or later)


def _requested_bytes(spec: Manifest) -> int:
    """What the scheduler reserves while containers and sidecars run."""
    sidecars = [each for each in spec.get("initContainers") or [] if each.get("restartPolicy") == "Always"]
    resources = [each.get("resources") or {} for each in [*spec["containers"], *sidecars]]
    amounts = [
        (each.get("requests") or {}).get("memory") or (each.get("limits") or {}).get("memory") for each in resources
    ]
    return sum(memory_bytes(each) or 0 for each in [*amounts, (spec.get("overhead") or {}).get("memory")])


def _quantity(amount: int) -> str:
    return f"{amount // MIB}Mi" if amount % MIB == 0 else str(amount)


def init_resources(pod: Manifest, engine: Engine) -> Manifest:
    """What the engine asks for, and nothing that it does not: so the pod asks for no more than before.

    What init containers ask for is free again when the engine starts. Equal amounts pass the same quotas and limit ranges,
    and leave the pod its QoS class. With resources of the whole pod: none, since a container's may not exceed them.
    """
    if pod["spec"].get("resources"):
        return {}
    own = engine.container.get("resources") or {}
    copied = {
        kind: {name: amount for name, amount in (own.get(kind) or {}).items() if name in COPIED}
        for kind in ("requests", "limits")
    }
    return {kind: amounts for kind, amounts in copied.items() if amounts}
