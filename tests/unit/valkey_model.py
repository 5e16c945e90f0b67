"""A small model of Valkey's cluster bus, as far as forming and healing depend on it.

Owns nodes, what each believes, and the passing of time. Invariant: a node's belief gives a slot to at most one node. Rules are
those of 9.1: the greater config epoch wins a slot, equal epochs are told apart by the greater id, a forgotten node comes back
by MEET only, and whoever forgot it has the others forget it too for a while, an unknown sender is ignored, a command has its
effect or is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from kvpool_operator.valkey.commands import Arguments, Command, Pod
from kvpool_operator.valkey.members import SeenPod, Waiting
from kvpool_operator.valkey.slots import mask_of, ranges_of
from kvpool_operator.valkey.view import Migration, NodeView, Peer

BAN_SECONDS = 60
"""Valkey's default; ours is shorter."""

_numbers = itertools.count(1)


class RefusedError(Exception):
    """The node's error reply."""


@dataclass
class Node:
    """One server's nodes.conf and what is in its memory. owner: slot set of every node that it knows, itself too."""

    node_id: str
    host: str
    epoch: int = 0
    owner: dict[str, int] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)
    banned: dict[str, int] = field(default_factory=dict)
    primary: str | None = None
    exports: list[Migration] = field(default_factory=list)
    pending: list[tuple[int, str]] = field(default_factory=list)
    started_at: int = 0

    @property
    def slots(self) -> int:
        """What it claims."""
        return self.owner.get(self.node_id, 0)

    def give(self, slots: int, node_id: str | None) -> None:
        """From now on it believes these slots to be of this node."""
        for other in self.owner:
            self.owner[other] &= ~slots
        if node_id is not None:
            self.owner[node_id] = self.owner.get(node_id, 0) | slots

    def max_epoch(self) -> int:
        """The greatest epoch it heard of."""
        return max([self.epoch, *(peer.epoch for peer in self.peers.values())])

    def epoch_of(self, node_id: str) -> int:
        """Epoch of a node that it knows."""
        return self.epoch if node_id == self.node_id else self.peers[node_id].epoch


class Bus:
    """All that runs. Time passes in `gossip` only, a second a round; handshakes end in the round after MEET."""

    def __init__(self) -> None:
        self.now_seconds = 1000
        self.running: dict[str, Node] = {}
        self._meetings: list[tuple[Node, str]] = []

    def start(self, node: Node) -> None:
        """A server runs at its host."""
        node.started_at = self.now_seconds
        for peer in node.peers.values():
            node.peers[peer.node_id] = replace(peer, pong_ms=self.now_seconds * 1000)
        self.running[node.host] = node

    def stop(self, host: str) -> None:
        """A server is killed; migrations that it sent or received are off."""
        node = self.running.pop(host)
        node.exports, node.pending = [], []

    # ----------------------------------------------------------------------------------------------- what admins do

    def look(self, pod: Pod) -> SeenPod:
        """As `admin.look`."""
        node = self.running.get(pod.host)
        if node is None:
            return SeenPod(pod, None, Waiting("ShardUnreachable", pod.name))
        peers = tuple(replace(peer, slots=node.owner.get(peer.node_id, 0)) for peer in node.peers.values())
        meeting = tuple(
            Peer(f"handshake-{host}", host, pod.port, 0, 0, 0, is_handshake=True)
            for member, host in self._meetings
            if member is node
        )
        view = NodeView(
            node_id=node.node_id,
            epoch=node.epoch,
            slots=node.slots,
            peers=peers + meeting,
            is_replica=node.primary is not None,
            exports=tuple(reversed(node.exports)),
            time_ms=self.now_seconds * 1000,
            uptime_seconds=self.now_seconds - node.started_at,
        )
        return SeenPod(pod, view)

    def execute(self, command: Command) -> None:
        """As `admin.execute`, on what is on the wire."""
        node = self.running.get(command.pod.host)
        if node is None:
            raise RefusedError("unreachable")
        for arguments in command.wire():
            self._run(node, arguments)

    def _run(self, node: Node, arguments: Arguments) -> None:  # noqa: C901 (one branch a command)
        match arguments:
            case ("CLUSTER", "FORGET", str(node_id)):
                if node.primary == node_id:
                    raise RefusedError("can't forget my master")
                self._forget(node, node_id, self.now_seconds + BAN_SECONDS)
            case ("CLUSTER", "MEET", str(host), int(), int()):
                self._meetings.append((node, host))
            case ("CLUSTER", "RESET", "HARD"):
                fresh = Node(f"n{next(_numbers):04}", node.host, started_at=node.started_at)
                self.running[node.host] = fresh
            case ("CLUSTER", "SET-CONFIG-EPOCH", int(epoch)):
                if node.peers or node.epoch or any(member is node for member, _ in self._meetings):
                    raise RefusedError("not fresh")
                node.epoch = epoch
            case ("CLUSTER", "ADDSLOTSRANGE", *edges):
                slots = _mask(edges)
                if any(owned & slots for owned in node.owner.values()) or node.primary is not None:
                    raise RefusedError("slot is already busy")
                node.give(slots, node.node_id)
            case ("CLUSTER", "DELSLOTSRANGE", *edges):
                node.give(_mask(edges), None)
            case ("CLUSTER", "BUMPEPOCH"):
                if node.epoch == 0 or node.epoch != node.max_epoch():
                    node.epoch = node.max_epoch() + 1
            case ("CLUSTER", "MIGRATESLOTS", *rest):
                self._migrate(node, list(rest))
            case _:
                raise AssertionError(arguments)

    def _forget(self, node: Node, node_id: str, until_seconds: int) -> None:
        if node.peers.pop(node_id, None) is not None:
            node.owner.pop(node_id, None)
            node.heard.pop(node_id, None)
            node.banned[node_id] = until_seconds

    def _migrate(self, node: Node, rest: list[str | int]) -> None:
        if node.pending:
            raise RefusedError("migrations are under way")
        while rest:
            end = rest.index("NODE")
            slots, target = _mask(rest[1:end]), str(rest[end + 1])
            if slots & ~node.slots or target not in node.peers:
                raise RefusedError("slots are not mine, or the node is not known")
            node.pending.append((slots, target))
            node.exports.append(Migration(target, "snapshotting"))
            rest = rest[end + 2 :]

    # -------------------------------------------------------------------------------------------------- what happens

    def gossip(self, *, migrations_fail: bool = False) -> None:
        """A second passes: meetings, migrations, then everybody hears of everybody it knows."""
        self.now_seconds += 1
        for node in self.running.values():
            node.banned = {node_id: end for node_id, end in node.banned.items() if end > self.now_seconds}
        meetings, self._meetings = self._meetings, []
        for node, host in meetings:
            self._meet(node, host)
        for node in list(self.running.values()):
            self._finish_migrations(node, fail=migrations_fail)
        for sender, receiver in itertools.permutations(list(self.running.values()), 2):
            self._ping(sender, receiver)

    def _meet(self, node: Node, host: str) -> None:
        other = self.running.get(host)
        if other is None or other is node or self.running.get(node.host) is not node:
            return
        for one, two in ((node, other), (other, node)):
            one.peers[two.node_id] = Peer(two.node_id, two.host, 6379, two.epoch, 0, self.now_seconds * 1000)
            one.owner.setdefault(two.node_id, 0)

    def _finish_migrations(self, node: Node, *, fail: bool) -> None:
        for slots, target_id in node.pending:
            target = next((one for one in self.running.values() if one.node_id == target_id), None)
            is_done = target is not None and not fail and not slots & ~node.slots and node.node_id in target.peers
            node.exports = [one for one in node.exports if not one.is_active or one.target_id != target_id]
            node.exports.append(Migration(target_id, "success" if is_done else "failed"))
            if is_done and target is not None:
                target.give(slots, target_id)
                target.epoch = target.max_epoch() + 1
                node.give(slots, target_id)
        node.pending = []

    def _ping(self, sender: Node, receiver: Node) -> None:
        """A header with claims, and gossip about others; only between nodes that know each other."""
        at = sender.peers.get(receiver.node_id)
        if at is None or at.host != receiver.host or sender.node_id not in receiver.peers:
            return
        receiver.peers[sender.node_id] = Peer(
            sender.node_id, sender.host, 6379, sender.epoch, 0, self.now_seconds * 1000
        )
        for node_id, until_seconds in list(sender.banned.items()):
            if receiver.primary != node_id:
                self._forget(receiver, node_id, until_seconds)
        self._hear_claims(sender, receiver)
        for peer in list(sender.peers.values()):
            is_new = peer.node_id not in receiver.peers and peer.node_id != receiver.node_id
            is_there = any(one.node_id == peer.node_id and one.host == peer.host for one in self.running.values())
            if is_new and is_there and peer.node_id not in receiver.banned:
                self._meetings.append((receiver, peer.host))

    def _hear_claims(self, sender: Node, receiver: Node) -> None:
        if sender.primary is not None:
            receiver.give(receiver.owner.get(sender.node_id, 0), None)
            return
        if receiver.primary is None and sender.epoch == receiver.epoch and sender.node_id > receiver.node_id:
            receiver.epoch = receiver.max_epoch() + 1
        receiver.heard[sender.node_id] = sender.slots
        for owner, slots in list(receiver.owner.items()):
            if owner == sender.node_id or receiver.epoch_of(owner) < sender.epoch:
                receiver.give(slots & sender.slots, sender.node_id)
            elif owner != receiver.node_id:  # what its owner claims no more is for anybody who does
                receiver.give(slots & sender.slots & ~receiver.heard.get(owner, slots), sender.node_id)
        free = sender.slots
        for slots in receiver.owner.values():
            free &= ~slots
        receiver.give(free, sender.node_id)


def _mask(edges: list[str | int]) -> int:
    numbers = [int(edge) for edge in edges]
    return mask_of(zip(numbers[::2], numbers[1::2], strict=True))


def describe(bus: Bus) -> list[str]:
    """For a failing test: who has what."""
    return [
        f"{node.node_id}@{node.host} epoch {node.epoch} {ranges_of(node.slots)} knows {sorted(node.peers)}"
        for node in bus.running.values()
    ]
