"""What a plan may tell a node, as values.

Pure. Invariant: every command may be given twice, and a refused one leaves the node as it was or nearer to the goal.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_operator.valkey.slots import describe, ranges_of

Arguments = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the StatefulSet as Kubernetes sees it. host: its address, "" when it has none yet."""

    name: str
    ordinal: int
    uid: str
    host: str
    port: int = 6379
    bus_port: int = 16379
    is_terminating: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """A node that became a replica starts anew, empty, as a primary with a new id."""

    pod: Pod

    def wire(self) -> list[Arguments]:
        """The commands to send."""
        return [("CLUSTER", "RESET", "HARD")]

    def __str__(self) -> str:
        return f"made {self.pod.name} a primary again: it had become a replica"


@dataclass(frozen=True, slots=True)
class Forget:
    """A node drops others that are gone, and thereby their slots."""

    pod: Pod
    node_ids: tuple[str, ...]

    def wire(self) -> list[Arguments]:
        """The commands to send."""
        return [("CLUSTER", "FORGET", node_id) for node_id in self.node_ids]

    def __str__(self) -> str:
        return f"nodes {', '.join(node_id[:8] for node_id in self.node_ids)} are gone and were forgotten"


@dataclass(frozen=True, slots=True)
class Stabilize:
    """Slots opened for a key-by-key move that nobody finishes are closed."""

    pod: Pod
    slots: tuple[int, ...]

    def wire(self) -> list[Arguments]:
        """The commands to send."""
        return [("CLUSTER", "SETSLOT", slot, "STABLE") for slot in self.slots]

    def __str__(self) -> str:
        return f"closed {len(self.slots)} slots of {self.pod.name} that were left open"


@dataclass(frozen=True, slots=True)
class Claim:
    """A node takes slots. What another node holds in them is lost.

    released: those that its view gives to somebody else. epoch: for a fresh node, before all else; others bump theirs:
    the claim then wins over every older one.
    """

    pod: Pod
    slots: int
    released: int = 0
    epoch: int | None = None

    def wire(self) -> list[Arguments]:
        """The commands to send."""
        commands: list[Arguments] = []
        if self.epoch is not None:
            commands.append(("CLUSTER", "SET-CONFIG-EPOCH", self.epoch))
        if self.released:
            commands.append(("CLUSTER", "DELSLOTSRANGE", *_flat(self.released)))
        commands.append(("CLUSTER", "ADDSLOTSRANGE", *_flat(self.slots)))
        if self.epoch is None:
            commands.append(("CLUSTER", "BUMPEPOCH"))
        return commands

    def __str__(self) -> str:
        return f"{self.pod.name} took {describe(self.slots)}"


@dataclass(frozen=True, slots=True)
class Meet:
    """A node gets to know others, or their new addresses."""

    pod: Pod
    others: tuple[Pod, ...]

    def wire(self) -> list[Arguments]:
        """The commands to send."""
        return [("CLUSTER", "MEET", other.host, other.port, other.bus_port) for other in self.others]

    def __str__(self) -> str:
        return f"{self.pod.name} met {', '.join(other.name for other in self.others)}"


@dataclass(frozen=True, slots=True)
class Bump:
    """A node repeats its claims with an epoch above all others, because somebody still believes an older one."""

    pod: Pod

    def wire(self) -> list[Arguments]:
        """The commands to send."""
        return [("CLUSTER", "BUMPEPOCH")]

    def __str__(self) -> str:
        return f"{self.pod.name} asserted its slots"


@dataclass(frozen=True, slots=True)
class Migrate:
    """Slots go to other nodes with what they hold. moves: (slots, node id of the target, its pod's name)."""

    pod: Pod
    moves: tuple[tuple[int, str, str], ...]

    def wire(self) -> list[Arguments]:
        """The commands to send: one, all or nothing."""
        parts: list[str | int] = ["CLUSTER", "MIGRATESLOTS"]
        for slots, target_id, _ in self.moves:
            parts += ["SLOTSRANGE", *_flat(slots), "NODE", target_id]
        return [tuple(parts)]

    def __str__(self) -> str:
        moves = ", ".join(f"{describe(slots)} to {name}" for slots, _, name in self.moves)
        return f"{self.pod.name} began to move {moves}"


Command = Reset | Forget | Stabilize | Claim | Meet | Bump | Migrate


def _flat(slots: int) -> list[int]:
    return [edge for run in ranges_of(slots) for edge in run]
