"""What agents say of the shared tier, and what to do about it.

Pure. Invariant: a remedy names only what whoever reads it can change: fields of the spec for an external Valkey, never for a
managed one, which has neither endpoints nor Secrets of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool_operator import reasons
from kvpool_operator.observed import AgentStats
from kvpool_operator.status.condition import Condition, Problem, fails, unknown
from kvpool_operator.valkey.acl import EXTERNAL_RIGHTS

KIND = reasons.VALKEY_AVAILABLE
_FORBIDDEN = re.compile(r"\bforbidden\b")
"""An agent's word for a right that its user lacks; whatever its state is, nothing but the right mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What is wrong and what to do, by what agents say."""

    forbidden: str
    unauthenticated: str
    unreachable: str
    degraded: str


EXTERNAL = Remedies(
    forbidden=f"Valkey forbids the user a command that is needed: give it {EXTERNAL_RIGHTS} on keys that begin with the prefix",
    unauthenticated="Valkey refuses user or password: correct keys username and password of "
    "spec.valkey.external.authSecretRef's Secret",
    unreachable="Valkey cannot be reached: correct spec.valkey.external.endpoints, or look at network and servers",
    degraded="some shards do not answer: look at these servers",
)
MANAGED = Remedies(
    forbidden="the shards forbid agents a command that is needed: they were started with the ACL of another release and are "
    "replaced one by one: wait; if it lasts, delete their pods one by one",
    unauthenticated="the shards refuse the agents' password: after it was renewed, shards are replaced and agents read the new "
    "one by themselves: wait two minutes; if it lasts, delete the pods of the shards",
    unreachable="no shard can be reached from the agents, though the operator reaches them: let agents' pods connect to port "
    "6379 of the shards' (NetworkPolicies of the namespace)",
    degraded="some shards do not answer the agents, though they answer the operator: let agents' pods connect to port 6379 of "
    "the shards' on every node (NetworkPolicies, network between nodes)",
)


def heard(asked: Sequence[AgentStats], remedies: Remedies) -> Condition | None:
    """What agents find wrong, worst first; None when they find nothing wrong. asked: those that said how their tier is."""
    forbidden = [stats for stats in asked if _FORBIDDEN.search(stats.valkey_detail)]
    if forbidden:
        lacking = forbidden[0].valkey_detail.partition(": give it")[0]  # the remedy is ours
        message = f"{len(forbidden)} of {len(asked)} agents say: {remedies.forbidden} ({lacking})"
        return fails(KIND, Problem(reasons.VALKEY_FORBIDDEN, message))
    worst = (
        ("unauthenticated", reasons.VALKEY_PASSWORD_WRONG, remedies.unauthenticated),
        ("unreachable", reasons.VALKEY_UNREACHABLE, remedies.unreachable),
        ("degraded", reasons.VALKEY_DEGRADED, remedies.degraded),
    )
    for state, reason, remedy in worst:
        saying = [stats for stats in asked if stats.valkey_state == state]
        if saying:
            detail = f" ({saying[0].valkey_detail})" if saying[0].valkey_detail else ""
            return fails(KIND, Problem(reason, f"{len(saying)} of {len(asked)} agents say: {remedy}{detail}"))
    if asked and all(stats.valkey_state == "connecting" for stats in asked):
        return unknown(KIND, reasons.AWAITING_AGENTS, "the agents are connecting to Valkey: wait")
    return None
