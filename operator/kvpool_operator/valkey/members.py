"""The nodes that answer, and those that are only talked about.

Pure. Invariant: every node id that any answering node knows is exactly one of: a member, a replica that is made anew, a
stranger, or a handshake that has no id yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpool_operator.valkey.commands import Pod
from kvpool_operator.valkey.slots import ALL
from kvpool_operator.valkey.view import NodeView, Peer, normal_host

PATIENCE_SECONDS = 30
"""How long slots wait for a silent node, and a new cluster for its last pods."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why the cluster is not settled. reason: CamelCase, for conditions; message: which pods, and what happens next."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class SeenPod:
    """A pod and what its node says; view None = it does not answer, and `problem` says why."""

    pod: Pod
    view: NodeView | None
    problem: Waiting | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A node that answers and is a primary. known: its peers by node id."""

    pod: Pod
    view: NodeView
    known: Mapping[str, Peer] = field(compare=False)

    @property
    def precedence(self) -> tuple[int, int]:
        """Of two that claim a slot the greater one keeps it."""
        return self.view.epoch, -self.pod.ordinal

    def peer(self, other: Member) -> Peer | None:
        """What this member knows of another."""
        return self.known.get(other.view.node_id)

    def reaches(self, other: Member) -> bool:
        """Whether this member knows another, at its present address."""
        peer = self.peer(other)
        return peer is not None and not peer.is_handshake and is_at(peer, other.pod)


@dataclass(frozen=True, slots=True)
class Stranger:
    """A node that members know and that does not answer us. slots: what any member believes it has.

    is_awaited: a pod that exists has its address and may come back with its id. silent_seconds: since any member heard of it.
    """

    node_id: str
    slots: int
    is_awaited: bool
    silent_seconds: float


def members_of(seen: Iterable[SeenPod]) -> list[Member]:
    """By ordinal."""
    found = [
        Member(one.pod, one.view, {peer.node_id: peer for peer in one.view.peers})
        for one in seen
        if one.view is not None and not one.view.is_replica
    ]
    return sorted(found, key=lambda member: member.pod.ordinal)


def strangers_of(seen: Sequence[SeenPod]) -> list[Stranger]:
    """By node id."""
    views = [one.view for one in seen if one.view is not None]
    ours = {view.node_id for view in views}
    absent = [one.pod for one in seen if one.view is None]
    sightings: dict[str, list[tuple[Peer, NodeView]]] = {}
    for view in views:
        for peer in view.peers:
            if peer.node_id not in ours and not peer.is_handshake:
                sightings.setdefault(peer.node_id, []).append((peer, view))
    return [
        Stranger(
            node_id=node_id,
            slots=union(peer.slots for peer, _ in seen_by),
            is_awaited=any(is_at(peer, pod) for peer, _ in seen_by for pod in absent),
            silent_seconds=min(view.time_ms - peer.pong_ms for peer, view in seen_by) / 1000,
        )
        for node_id, seen_by in sorted(sightings.items())
    ]


def gone_strangers(
    strangers: Sequence[Stranger], members: Sequence[Member], shards: int, patience_seconds: float
) -> list[Stranger]:
    """Those to forget now.

    A stranger whose pod is gone and that has slots is kept until a newcomer can take them, or nobody is to come any more, or
    it was silent for long: forgotten earlier, its slots would go to survivors and soon come back.
    """
    wanted = [member for member in members if member.pod.ordinal < shards]
    newcomers = sum(not member.view.slots for member in wanted)
    gone: list[Stranger] = []
    for stranger in strangers:
        if stranger.silent_seconds >= patience_seconds:
            gone.append(stranger)
        elif not stranger.is_awaited and (not stranger.slots or len(wanted) == shards or newcomers > 0):
            gone.append(stranger)
            newcomers -= bool(stranger.slots)
    return gone


def union(masks: Iterable[int]) -> int:
    """All slots of several masks."""
    result = 0
    for mask in masks:
        result |= mask
    return result


def covered(members: Iterable[Member]) -> int:
    """Slots that some member claims."""
    return union(member.view.slots for member in members) & ALL


def is_at(peer: Peer, pod: Pod) -> bool:
    """Whether a node was seen at a pod's address."""
    return bool(pod.host) and (peer.host, peer.port) == (normal_host(pod.host), pod.port)
