"""Who has to be made known to whom, and whose claims have to be repeated.

Pure. Invariant: once every meeting took place and every assertion was heard, all members know each other at their present
addresses, and every slot has the same owner in all views.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_operator.valkey.commands import Bump, Meet, Pod
from kvpool_operator.valkey.members import Member, is_at, union


def plan_meetings(members: Sequence[Member]) -> list[Meet]:
    """One member of the largest group meets one of each other group; within a group each meets whom it lacks.

    Gossip does the rest, except for nodes that were forgotten less than a minute ago.
    """
    groups = _groups(members)
    if not groups:
        return []
    host, *guests = (group[0] for group in groups)
    meetings: dict[Pod, list[Pod]] = {host.pod: [guest.pod for guest in guests if not _is_meeting(host, guest)]}
    for group in groups:
        for index, member in enumerate(group):
            for other in group[index + 1 :]:
                if not member.reaches(other) and not _is_meeting(member, other):
                    meetings.setdefault(member.pod, []).append(other.pod)
                elif not other.reaches(member) and not _is_meeting(other, member):
                    meetings.setdefault(other.pod, []).append(member.pod)
    return [Meet(pod, tuple(others)) for pod, others in meetings.items() if others]


def plan_assertions(members: Sequence[Member]) -> list[Bump]:
    """Members whose claim somebody they are connected with gives to another, and whose epoch is not yet above all."""
    return [
        Bump(member.pod) for member in members if _is_contested(member, members) and not _is_above_all(member, members)
    ]


def is_agreed(members: Sequence[Member]) -> bool:
    """Whether all members know each other, have the same idea of who has what, and say that all is well."""
    return all(
        member.view.is_ok
        and all(
            other is member
            or (member.reaches(other) and (peer := member.peer(other)) is not None and peer.slots == other.view.slots)
            for other in members
        )
        for member in members
    )


def served(members: Sequence[Member]) -> int:
    """Slots that a member has, or that another says it has: the views are not of one instant, and slots move between."""
    ids = {member.view.node_id for member in members}
    believed = (peer.slots for member in members for peer in member.view.peers if peer.node_id in ids)
    return union(member.view.slots for member in members) | union(believed)


def _groups(members: Sequence[Member]) -> list[list[Member]]:
    """Members connected by knowing each other, in any number of steps; the largest group first."""
    groups: list[list[Member]] = []
    for member in members:
        joined = [group for group in groups if any(member.reaches(one) or one.reaches(member) for one in group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([one for group in joined for one in group] + [member], key=lambda one: one.pod.ordinal))
    return sorted(groups, key=lambda group: (-len(group), group[0].pod.ordinal))


def _is_meeting(member: Member, other: Member) -> bool:
    """Whether a handshake between them is under way."""
    return any(peer.is_handshake and is_at(peer, other.pod) for peer in member.view.peers)


def _is_contested(member: Member, members: Sequence[Member]) -> bool:
    claims = {other.view.node_id: other for other in members}
    for other in members:
        if other is member or not (member.reaches(other) and other.reaches(member)):
            continue
        if other.view.slots & member.view.slots and member.precedence > other.precedence:
            return True
        rivals = (
            peer for peer in other.view.peers if peer.node_id != member.view.node_id and peer.slots & member.view.slots
        )
        for rival in rivals:
            claimant = claims.get(rival.node_id)
            is_claimed = claimant is not None and bool(claimant.view.slots & member.view.slots)
            if not is_claimed or (claimant is not None and member.precedence > claimant.precedence):
                return True
    return False


def _is_above_all(member: Member, members: Sequence[Member]) -> bool:
    others = [other.view.epoch for other in members if other is not member]
    believed = [peer.epoch for other in members for peer in other.view.peers if peer.node_id != member.view.node_id]
    return member.view.epoch > max([*others, *believed], default=-1)
