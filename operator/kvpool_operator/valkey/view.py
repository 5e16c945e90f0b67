"""What one node says of itself and of the cluster, parsed from its replies.

Pure. Invariant: a view is a whole: it is made from the replies of one round trip, or not at all (ValkeyReplyError).
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool_core.errors import KVPoolError
from kvpool_operator.valkey.slots import mask_of

FINISHED = frozenset({"success", "failed", "canceled", "cancelled"})
"""Final states of a slot migration."""


class ValkeyReplyError(KVPoolError):
    """A node answered what this module does not understand."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node as a node sees it. host "" = its address is not known. pong_ms: last sign of life, by the seer's clock."""

    node_id: str
    host: str
    port: int
    epoch: int
    slots: int
    pong_ms: int
    is_handshake: bool = False


@dataclass(frozen=True, slots=True)
class Migration:
    """A slot migration that this node sends, running or finished."""

    target_id: str
    state: str

    @property
    def is_active(self) -> bool:
        """Whether it still runs."""
        return self.state not in FINISHED


@dataclass(frozen=True, slots=True)
class NodeView:
    """slots: what it claims. open_slots: half of a key-by-key move that nobody will finish. exports: newest first.

    maxmemory_bytes 0 = no limit. time_ms: its clock.
    """

    node_id: str
    epoch: int
    slots: int
    peers: tuple[Peer, ...]
    is_replica: bool = False
    is_ok: bool = True
    open_slots: tuple[int, ...] = ()
    exports: tuple[Migration, ...] = ()
    time_ms: int = 0
    uptime_seconds: int = 0
    data_bytes: int = 0
    used_bytes: int = 0
    maxmemory_bytes: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether it was never part of anything: only then may its epoch be set."""
        return not self.peers and not self.slots and self.epoch == 0


def parse_view(
    *, nodes: str, cluster_info: str, info: str, migrations: Sequence[Mapping[str, str]], time_ms: int
) -> NodeView:
    """From CLUSTER NODES, CLUSTER INFO, INFO server memory, CLUSTER GETSLOTMIGRATIONS (maps) and TIME."""
    facts = _facts(info)
    try:
        lines = [_Line.parse(line) for line in nodes.splitlines() if line.strip()]
        (me,) = (line for line in lines if "myself" in line.flags)
        return NodeView(
            node_id=me.peer.node_id,
            epoch=me.peer.epoch,
            slots=me.peer.slots,
            peers=tuple(line.peer for line in lines if line is not me),
            is_replica=bool(me.flags & {"slave", "replica"}),
            is_ok=_facts(cluster_info)["cluster_state"] == "ok",
            open_slots=me.open_slots,
            exports=tuple(
                Migration(job["target_node"], job["state"]) for job in migrations if job["operation"] == "EXPORT"
            ),
            time_ms=time_ms,
            uptime_seconds=int(facts["uptime_in_seconds"]),
            data_bytes=int(facts["used_memory_dataset"]),
            used_bytes=int(facts["used_memory"]),
            maxmemory_bytes=int(facts["maxmemory"]),
        )
    except (KeyError, ValueError, IndexError) as error:
        raise ValkeyReplyError(
            f"a Valkey node's description of the cluster is not understood ({type(error).__name__}: {error}); "
            "the managed Valkey's image must be Valkey 9.0 or later with cluster-enabled"
        ) from error


@functools.lru_cache(maxsize=4096)
def normal_host(host: str) -> str:
    """An address in one spelling, so that Kubernetes' and Valkey's can be compared."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host


@dataclass(frozen=True, slots=True)
class _Line:
    """<id> <host:port@bus[,hostname...]> <flags> <primary> <ping> <pong> <epoch> <link> <slot> ..."""

    peer: Peer
    flags: frozenset[str]
    open_slots: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> _Line:
        node_id, address, flag_text, _, _, pong, epoch, _, *slots = text.split()
        host, _, port = address.split("@")[0].rpartition(":")
        flags = frozenset(flag_text.split(","))
        ranges = [part.split("-") for part in slots if not part.startswith("[")]
        peer = Peer(
            node_id=node_id,
            host="" if "noaddr" in flags else normal_host(host),
            port=int(port),
            epoch=int(epoch),
            slots=mask_of((int(run[0]), int(run[-1])) for run in ranges),
            pong_ms=int(pong),
            is_handshake="handshake" in flags,
        )
        return _Line(peer, flags, tuple(int(part[1:].split("-")[0]) for part in slots if part.startswith("[")))


def _facts(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
