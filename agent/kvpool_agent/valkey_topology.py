"""Which node serves which block: a standalone server or a cluster as valkey-py's NodesManager sees it.

Blocking, used from threads only (`shard_of` apart, which reads memory). Invariant: `shard_of` answers from the last
topology that a node confirmed; a refresh that fails changes nothing.
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, cast

import valkey
from valkey.cluster import PRIMARY, ClusterNode, NodesManager
from valkey.exceptions import AskError, MovedError, ValkeyClusterException

from kvpool_agent.valkey_connection import DeadlineConnection, connection_arguments, open_pool
from kvpool_agent.valkey_settings import ValkeySettings, parse_endpoint


class Topology(Protocol):
    """Shards are named host:port, as the nodes name themselves. `is_stale`: a node said so; until the next refresh."""

    is_stale: bool

    @property
    def kind(self) -> str:
        """cluster | standalone."""

    def shards(self) -> list[str]:
        """Every node that serves slots."""

    def shard_of(self, slot: int) -> str | None:
        """The node that serves a slot; None when nobody does."""

    def pool(self, shard: str) -> valkey.ConnectionPool | None:
        """The connections of a node; None when it is not known."""

    def redirect(self, error: AskError) -> str:
        """Take note of MOVED or ASK; the node to go to."""

    def refresh(self, is_usable: Callable[[str], bool]) -> None:
        """Ask the nodes anew, those that are usable first; raises when none answers."""

    def close(self) -> None:
        """Close every connection."""


def discover(settings: ValkeySettings) -> Topology:
    """The topology behind the configured endpoints; raises what valkey-py raises when no node answers."""
    if settings.topology == "Cluster":
        return ClusterTopology(settings)
    if settings.topology == "Standalone":
        return StandaloneTopology(settings)
    _, info = _first_answer(settings)
    return ClusterTopology(settings) if info.get("cluster_enabled") == "1" else StandaloneTopology(settings)


class StandaloneTopology:
    """One server for all: the first endpoint that answers as a primary, else the first that answers."""

    kind = "standalone"

    def __init__(self, settings: ValkeySettings) -> None:
        self._settings = settings
        self.is_stale = False
        self._shard, _ = _first_answer(settings)
        self._pool = open_pool(settings, *parse_endpoint(self._shard))

    def shards(self) -> list[str]:
        """The one server."""
        return [self._shard]

    def shard_of(self, slot: int) -> str | None:  # noqa: ARG002 (one server for all)
        """The one server, whatever the slot."""
        return self._shard

    def pool(self, shard: str) -> valkey.ConnectionPool | None:
        """Its connections."""
        return self._pool if shard == self._shard else None

    def redirect(self, error: AskError) -> str:
        """A standalone server redirects nobody: it has become part of a cluster, and the caller fails."""
        raise LookupError(f"{self._shard} sends elsewhere ({error}) although it was found to be standalone")

    def refresh(self, is_usable: Callable[[str], bool]) -> None:
        """Look for another endpoint when the present one is not usable."""
        if is_usable(self._shard):
            return
        shard, _ = _first_answer(self._settings)
        if shard != self._shard:
            old, self._shard, self._pool = self._pool, shard, open_pool(self._settings, *parse_endpoint(shard))
            old.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close every connection."""
        self._pool.disconnect()


class ClusterTopology:
    """A cluster, by valkey-py's NodesManager: slots, nodes and their connections."""

    kind = "cluster"

    def __init__(self, settings: ValkeySettings) -> None:
        self._settings = settings
        self.is_stale = False
        self._lock = threading.Lock()
        self._nodes = NodesManager(
            startup_nodes=self._configured(),
            from_url=True,
            require_full_coverage=False,
            dynamic_startup_nodes=False,
            **connection_arguments(settings),
        )

    def shards(self) -> list[str]:
        """Every primary."""
        return sorted({nodes[0].name for nodes in list(self._nodes.slots_cache.values()) if nodes})

    def shard_of(self, slot: int) -> str | None:
        """The primary of a slot."""
        nodes = self._nodes.slots_cache.get(slot)
        return cast(str, nodes[0].name) if nodes else None

    def pool(self, shard: str) -> valkey.ConnectionPool | None:
        """Connections of a node; one that a redirect named is opened."""
        node = self._nodes.get_node(node_name=shard)
        if node is None:
            return None
        if node.valkey_connection is None:
            with self._lock:
                self._nodes.create_valkey_connections([node])
        return cast(valkey.ConnectionPool, node.valkey_connection.connection_pool)

    def redirect(self, error: AskError) -> str:
        """MOVED is remembered for its slot; ASK is for one request only."""
        shard = f"{error.host}:{error.port}"
        with self._lock:
            if self._nodes.get_node(node_name=shard) is None:
                self._nodes.nodes_cache[shard] = ClusterNode(error.host, error.port, PRIMARY)
            if isinstance(error, MovedError):
                self.is_stale = True
                self._nodes.update_moved_exception(error)
                self._nodes.slots_cache.setdefault(error.slot_id, [])
                self._nodes.get_node_from_slot(error.slot_id)
        return shard

    def refresh(self, is_usable: Callable[[str], bool]) -> None:
        """CLUSTER SLOTS from the first node that knows all slots; configured endpoints last, in case all moved."""
        with self._lock:
            known = list(self._nodes.nodes_cache.values())
            configured = [node for node in self._configured() if node.name not in self._nodes.nodes_cache]
            usable = [node for node in known if is_usable(node.name)]
            rest = [node for node in known if not is_usable(node.name)]
            self._nodes.startup_nodes = {node.name: node for node in (*usable, *configured, *rest)}
            self.is_stale = False
            self._nodes.initialize()

    def close(self) -> None:
        """Close every connection."""
        for node in list(self._nodes.nodes_cache.values()):
            if node.valkey_connection is not None:
                node.valkey_connection.connection_pool.disconnect()

    def _configured(self) -> list[ClusterNode]:
        return [ClusterNode(*parse_endpoint(endpoint)) for endpoint in self._settings.endpoints]


def node_info(pool: valkey.ConnectionPool, section: bytes, *, deadline: float) -> dict[str, str]:
    """INFO of a node as a dictionary."""
    connection = cast(DeadlineConnection, pool.get_connection("INFO"))
    try:
        connection.limit(deadline)
        connection.send_command("INFO", section)
        text = cast(bytes, connection.read_response()).decode(errors="replace")
    finally:
        connection.unlimit()
        pool.release(connection)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _first_answer(settings: ValkeySettings) -> tuple[str, dict[str, str]]:
    """(endpoint, INFO) of the first endpoint that is no replica, else of the first that answers."""
    replica: tuple[str, dict[str, str]] | None = None
    error: Exception = ValkeyClusterException("no endpoint is configured")
    for endpoint in settings.endpoints:
        pool = open_pool(settings, *parse_endpoint(endpoint))
        try:
            info = node_info(pool, b"default", deadline=time.monotonic() + settings.base_timeout_seconds)
        except (valkey.ValkeyError, OSError) as problem:
            error = problem
            continue
        finally:
            pool.disconnect()
        if info.get("role") == "master":
            return endpoint, info
        replica = replica or (endpoint, info)
    if replica is None:
        raise error
    return replica
