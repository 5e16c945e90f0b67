"""From pods to a step of healing and back to what status shows.

Invariant: a step that fails as a whole looks like a cluster of which nothing is known: nothing is scaled down because of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvpool_operator.fence import Fence
from kvpool_operator.observed import Pod, ValkeyHealth
from kvpool_operator.valkey import heal as healing

_ORDINAL = re.compile(r"-(\d+)$")


def heal(pods: Sequence[Pod], *, shards: int, password: str, fence: Fence) -> ValkeyHealth:
    """One step; NotLeaderError when it may change nothing (any more)."""
    result = healing.step([_shard(pod) for pod in pods], shards=shards, password=password, fence=fence)
    return ValkeyHealth(
        shards=result.shards,
        ready=result.ready,
        slots_covered=result.slots_covered,
        replicas=result.replicas,
        refusing=frozenset(result.refusing),
        waiting=tuple((one.reason, one.message) for one in result.waiting),
        actions=result.actions,
    )


def _shard(pod: Pod) -> healing.Pod:
    match = _ORDINAL.search(pod.name)
    return healing.Pod(
        name=pod.name,
        ordinal=int(match[1]) if match else 0,
        uid=pod.uid,
        host=pod.ip,
        is_terminating=pod.is_terminating,
    )
