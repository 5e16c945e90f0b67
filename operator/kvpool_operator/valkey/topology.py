"""What to do next so that the managed Valkey's cluster becomes whole, and stays so.

Pure: what every node says and what Kubernetes says -> a plan. Nothing is remembered between plans: the nodes tell. Invariants:
a settled cluster gets an empty plan; a node is forgotten everywhere before its slots are given to another (any other order
made newcomers replicas of the dead, measured on 9.1.2); slots are moved only when all else is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool_operator.valkey.commands import Claim, Command, Forget, Migrate, Pod, Reset, Stabilize
from kvpool_operator.valkey.meeting import is_agreed, plan_assertions, plan_meetings, served
from kvpool_operator.valkey.members import (
    PATIENCE_SECONDS,
    Member,
    SeenPod,
    Stranger,
    Waiting,
    covered,
    gone_strangers,
    members_of,
    strangers_of,
    union,
)
from kvpool_operator.valkey.shares import plan_moves, share_out
from kvpool_operator.valkey.slots import ALL, describe

__all__ = ["Plan", "Pod", "SeenPod", "Waiting", "plan", "replicas_needed"]

FORMING, MISSING, HEALING, SETTLING, MOVING = (
    "ClusterForming",
    "ShardMissing",
    "ClusterHealing",
    "ClusterSettling",
    "SlotsMoving",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """commands: in this order; those of one kind may run at once, and a failure ends the plan after its kind.

    waiting: why the cluster is not settled; empty together with `commands`: all is well. disputed: slots that nobody says to have,
    but somebody says that another member has. They may just have moved while the nodes were asked one after the other, so
    they are given away only when they are `confirmed`: still disputed in a second look.
    """

    commands: tuple[Command, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    disputed: int = 0


def plan(
    seen: Sequence[SeenPod], shards: int, *, patience_seconds: float = PATIENCE_SECONDS, confirmed: int = 0
) -> Plan:
    """What to do now. seen: every pod that exists and is not terminating, also those beyond `shards`."""
    members = members_of(seen)
    strangers = strangers_of(seen)
    gone = gone_strangers(strangers, members, shards, patience_seconds)
    kept = [stranger for stranger in strangers if stranger not in gone]
    absent = _absent(seen, shards)
    resets = [Reset(one.pod) for one in seen if one.view is not None and one.view.is_replica]
    if not members and not resets:
        return Plan((), tuple(absent))
    if _is_too_early(members, kept, shards, patience_seconds):
        message = (
            f"{len(members)} of {shards} pods answer; the cluster is formed when all do, or in {patience_seconds:g} s"
        )
        return Plan(tuple(resets), (*absent, Waiting(FORMING, message)))
    unowned = ALL & ~covered(members) & ~union(stranger.slots for stranger in kept)
    disputed = unowned & served(members) & ~confirmed
    mending: list[Command] = [
        *resets,
        *_forgets(members, gone),
        *(Stabilize(member.pod, member.view.open_slots) for member in members if member.view.open_slots),
        *_claims(members, gone, unowned & ~disputed, shards),
        *plan_meetings(members),
        *plan_assertions(members),
    ]
    if mending:
        missing = ALL & ~covered(members)
        doing = f"{describe(missing)} have no shard" if missing else "not all shards know of each other"
        return Plan(tuple(mending), (*absent, Waiting(HEALING, doing)), disputed)
    if not is_agreed(members):
        settling = Waiting(SETTLING, "the shards are telling each other who has which slots")
        return Plan((), (*absent, settling), disputed)
    return _moves(members, kept, absent, shards)


def replicas_needed(seen: Sequence[SeenPod], shards: int) -> int:
    """What the StatefulSet's replicas must be: `shards`, and more while a pod beyond it has slots or may have."""
    members = members_of(seen)
    if not members:
        return max([shards, *(one.pod.ordinal + 1 for one in seen)])
    awaited = [stranger for stranger in strangers_of(seen) if stranger.is_awaited and stranger.slots]
    keep = [member.pod.ordinal for member in members if member.view.slots]
    keep += [one.pod.ordinal for one in seen if one.view is None and awaited]
    return max([shards, *(ordinal + 1 for ordinal in keep)])


def _absent(seen: Iterable[SeenPod], shards: int) -> list[Waiting]:
    """Wanted pods that do not answer, and why."""
    ordinals = {one.pod.ordinal for one in seen}
    lacking = [str(ordinal) for ordinal in range(shards) if ordinal not in ordinals]
    problems = [one.problem for one in seen if one.problem is not None and one.pod.ordinal < shards]
    return problems + ([Waiting(MISSING, f"no pod yet for shard {', '.join(lacking)}")] if lacking else [])


def _is_too_early(members: Sequence[Member], kept: Sequence[Stranger], shards: int, patience_seconds: float) -> bool:
    """Whether nobody has slots yet and more pods may come soon: then they need not be moved right after."""
    if covered(members) or any(stranger.slots for stranger in kept):
        return False
    wanted = [member.view.uptime_seconds for member in members if member.pod.ordinal < shards]
    return len(wanted) < shards and max(wanted, default=0) < patience_seconds


def _forgets(members: Sequence[Member], gone: Sequence[Stranger]) -> list[Forget]:
    ids = {stranger.node_id for stranger in gone}
    known = {member.pod: tuple(sorted(ids & {peer.node_id for peer in member.view.peers})) for member in members}
    return [Forget(pod, node_ids) for pod, node_ids in known.items() if node_ids]


def _claims(members: Sequence[Member], gone: Sequence[Stranger], unowned: int, shards: int) -> list[Claim]:
    """Slots that nobody has go to those that have the fewest."""
    takers = [member for member in members if member.pod.ordinal < shards] or members
    given = share_out(unowned, {member.pod.ordinal: member.view.slots.bit_count() for member in takers}, shards)
    epoch = _highest_epoch(members)
    forgotten = {stranger.node_id for stranger in gone}
    claims: list[Claim] = []
    for member in members:
        if slots := given.get(member.pod.ordinal, 0):
            epoch += 1
            claims.append(_claim(member, slots, forgotten, epoch))
    return claims


def _claim(member: Member, slots: int, forgotten: Iterable[str], epoch: int) -> Claim:
    held = union(peer.slots for peer in member.view.peers if peer.node_id not in forgotten)
    return Claim(member.pod, slots, released=held & slots, epoch=epoch if member.view.is_fresh else None)


def _highest_epoch(members: Sequence[Member]) -> int:
    own = [member.view.epoch for member in members]
    return max([*own, *(peer.epoch for member in members for peer in member.view.peers)], default=0)


def _moves(members: Sequence[Member], kept: Sequence[Stranger], absent: Sequence[Waiting], shards: int) -> Plan:
    """The last stage: everybody gets an even share."""
    if any(migration.is_active for member in members for migration in member.view.exports):
        return Plan((), (*absent, Waiting(MOVING, "slots are on their way to other shards")))
    if any(stranger.slots for stranger in kept):
        missing = Waiting(HEALING, f"{describe(ALL & ~covered(members))} wait for their shard to come back")
        return Plan((), (*absent, missing))
    by_ordinal = {member.pod.ordinal: member for member in members}
    moves = plan_moves({ordinal: member.view for ordinal, member in by_ordinal.items()}, shards)
    commands: list[Command] = []
    for target, member in by_ordinal.items():
        if slots := union(move.slots for move in moves if move.target == target and move.is_lossy):
            commands.append(_claim(member, slots, (), 0))
    for source, member in by_ordinal.items():
        kept_moves = tuple(
            (move.slots, by_ordinal[move.target].view.node_id, by_ordinal[move.target].pod.name)
            for move in moves
            if move.source == source and not move.is_lossy
        )
        if kept_moves:
            commands.append(Migrate(member.pod, kept_moves))
    moving = Waiting(MOVING, f"{describe(union(move.slots for move in moves))} go to other shards")
    return Plan(tuple(commands), (*absent, moving) if commands else tuple(absent))
