"""One way to ask a shard something: bounded in time, counted, and its health noted.

Owns the deadline rule (base + per MiB). Invariant: `ask` never raises; what a shard did not answer is simply not among
the replies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from valkey.exceptions import ResponseError

from kvpool_agent.valkey_connection import Failure, failure_of
from kvpool_agent.valkey_exchange import EXCHANGE_ERRORS, RedirectedError, Reply, Request, exchange_following
from kvpool_agent.valkey_health import ShardHealth
from kvpool_agent.valkey_keys import BlockKey
from kvpool_agent.valkey_metrics import ValkeyMetrics
from kvpool_agent.valkey_settings import ValkeySettings
from kvpool_agent.valkey_topology import Topology

READS = frozenset({"get", "exists", "probe"})
_MIB = 1024 * 1024


class ValkeyLink:
    """The shards as the rest of the tier sees them. Thread-safe; `ask` blocks its thread, at most until the deadline.

    `topology` is None until the supervisor has found one. `attention` wakes the supervisor.
    """

    def __init__(self, settings: ValkeySettings, health: ShardHealth, metrics: ValkeyMetrics) -> None:
        self.topology: Topology | None = None
        self.attention = threading.Event()
        self.health = health
        self.metrics = metrics
        self._base_seconds = settings.base_timeout_seconds
        self._seconds_per_byte = settings.timeout_seconds_per_mib / _MIB

    def shard_of(self, slot: int) -> str | None:
        """The shard that serves a slot; None when none is known."""
        return self.topology.shard_of(slot) if self.topology is not None else None

    def ask(
        self, shard: str, requests: Sequence[Request], *, op: str, moved_bytes: int = 0, key: BlockKey | None = None
    ) -> Iterator[tuple[int, Reply]]:
        """Yield (index of the request, reply) as replies come; ends early when the shard fails.

        moved_bytes: value bytes expected in either direction. key: one that the shard should serve.
        """
        started = time.monotonic()
        deadline = started + self._base_seconds + moved_bytes * self._seconds_per_byte
        problem: ResponseError | None = None
        try:
            if self.topology is None:
                raise LookupError("no topology is known yet")
            for index, reply in exchange_following(self.topology, shard, requests, deadline=deadline):
                if isinstance(reply, ResponseError):
                    problem = reply if _is_link_problem(op, failure_of(reply)) else problem
                    self._count_resharding(reply)
                yield index, reply
        except RedirectedError as error:
            self._note_failure(error.target, error.__cause__ or error, key)
            self.health.succeeded(shard)
            return
        except EXCHANGE_ERRORS as error:
            self._note_failure(shard, error, key)
            return
        self.metrics.took(op, time.monotonic() - started)
        if problem is None:
            self.health.succeeded(shard)
        else:
            self._note_failure(shard, problem, key)

    def _count_resharding(self, reply: ResponseError) -> None:
        """Only counted: it says nothing of any shard's health."""
        if failure_of(reply) is Failure.RESHARDING:
            self.metrics.failure(Failure.RESHARDING.value)

    def _note_failure(self, shard: str, error: BaseException, key: BlockKey | None) -> None:
        """A node that has left the topology meanwhile has no health; nor does it say that contents were lost."""
        if isinstance(error, LookupError) and self.topology is not None and self.topology.pool(shard) is None:
            self.metrics.failure(failure_of(error).value)
        else:
            self.health.failed(shard, failure_of(error), error, key=key)
        self.attention.set()


def _is_link_problem(op: str, failure: Failure) -> bool:
    """Whether an error reply means that the shard is of no use.

    Not one to a write: a cluster without majority (CLUSTERDOWN), a full server and a replica may all still be read.
    """
    return op in READS and failure in (Failure.CLUSTER_DOWN, Failure.FORBIDDEN)
