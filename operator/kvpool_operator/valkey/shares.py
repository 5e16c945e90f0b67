"""Who shall have which slots: sharing out those that nobody has, and moving from the full to the empty.

Pure. Invariant: when all wanted shards are there, the moves of one plan give each of them exactly its quota, and nothing is left
with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool_operator.valkey.slots import SLOTS, lowest
from kvpool_operator.valkey.view import NodeView

FULL = 0.95
"""Share of maxmemory up to which slots are moved with their keys: a target without room evicts its own keys and then
fails (measured on 9.1.2), so what goes beyond is moved without."""
MAX_FAILURES = 2
"""Failed migrations in a row to one target, after which slots go there without their keys."""


@dataclass(frozen=True, slots=True)
class Move:
    """Slots from one ordinal to another. is_lossy: without their keys."""

    source: int
    target: int
    slots: int
    is_lossy: bool


def quota(ordinal: int, shards: int) -> int:
    """The slots that a shard has in the end; the unwanted have none."""
    return SLOTS * (ordinal + 1) // shards - SLOTS * ordinal // shards if ordinal < shards else 0


def share_out(unowned: int, counts: Mapping[int, int], shards: int) -> dict[int, int]:
    """Slots for each ordinal: first up to its quota, the rest evenly. counts: slots each has now."""
    given = dict.fromkeys(sorted(counts), 0)
    for ordinal in given:
        given[ordinal] = lowest(unowned, quota(ordinal, shards) - counts[ordinal])
        unowned &= ~given[ordinal]
    for index, ordinal in enumerate(given):
        rest = lowest(unowned, -(-unowned.bit_count() // (len(given) - index)))
        given[ordinal] |= rest
        unowned &= ~rest
    return {ordinal: slots for ordinal, slots in given.items() if slots}


def plan_moves(views: Mapping[int, NodeView], shards: int) -> list[Move]:
    """Moves from nodes (by ordinal) that have more than their quota to those that have less."""
    left = {ordinal: view.slots for ordinal, view in views.items()}
    room = {ordinal: _room_bytes(view) for ordinal, view in views.items()}
    moves: list[Move] = []
    for target in sorted(views):
        for source in sorted(views, reverse=True):
            surplus = left[source].bit_count() - quota(source, shards)
            slots = lowest(left[source], min(surplus, quota(target, shards) - left[target].bit_count()))
            if slots:
                left[source] &= ~slots
                left[target] |= slots
                moves += _with_or_without_keys(source, target, slots, views, room)
    return moves


def _room_bytes(view: NodeView) -> float:
    return view.maxmemory_bytes * FULL - view.used_bytes if view.maxmemory_bytes else float("inf")


def _with_or_without_keys(
    source: int, target: int, slots: int, views: Mapping[int, NodeView], room: dict[int, float]
) -> list[Move]:
    """The move, cut in two where the target has room for a part of the keys only."""
    view = views[source]
    fitting = 0
    if _failures(view, views[target].node_id) < MAX_FAILURES:
        bytes_per_slot = view.data_bytes / max(1, view.slots.bit_count())
        fitting = slots.bit_count()
        if bytes_per_slot > 0:
            fitting = int(max(0, min(fitting, room[target] / bytes_per_slot)))
        room[target] -= fitting * bytes_per_slot
    kept = lowest(slots, fitting)
    moves = [Move(source, target, kept, is_lossy=False), Move(source, target, slots & ~kept, is_lossy=True)]
    return [move for move in moves if move.slots]


def _failures(view: NodeView, target_id: str) -> int:
    """Migrations to this target that failed since the last one that did not."""
    count = 0
    for migration in view.exports:
        if migration.target_id == target_id:
            if migration.state == "success":
                break
            count += migration.state == "failed"
    return count
