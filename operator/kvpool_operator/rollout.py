"""Which outdated agent goes next.

Pure. Invariant: no agent that serves is taken away while another one that shall serve does not: at most one is missing because
of a rollout, and a rollout whose first new agent fails ends there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from kvpool_operator import reasons
from kvpool_operator.observed import Node, Pod, Rollout
from kvpool_operator.status.agents import is_serving

STOPPED_AFTER_SECONDS = 300.0
"""An updated agent that does not serve by then has failed: prefaulting a terabyte takes less."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do: delete `victim`, or wait (None). `rollout`: what status says."""

    victim: Pod | None
    rollout: Rollout
    is_waiting: bool = False
    """A pod is on its way: until it serves, no other pool may begin."""

    @property
    def needs_turn(self) -> bool:
        """Whether the pool may keep the operator's turn."""
        return self.victim is not None or self.is_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The agents of a pool: every pod, how many there shall be, the hash of the present template, ages by pod uid.

    short_seconds: for how long there have been fewer than there shall be, those that end not counted.
    """

    agents: Sequence[Pod]
    desired: int
    wanted_hash: str
    nodes: Mapping[str, Node]
    age_seconds: Mapping[str, float]
    short_seconds: float = 0.0

    def is_reachable(self, pod: Pod) -> bool:
        """A pod on a node that is away neither holds a rollout up nor can be replaced."""
        node = self.nodes.get(pod.node)
        return node is None or node.is_ready

    @property
    def is_outdated(self) -> bool:
        """Whether an agent is to be replaced."""
        return any(pod.config_hash != self.wanted_hash and not pod.is_terminating for pod in self.agents)

    @property
    def is_short(self) -> bool:
        """Whether an agent was taken away, or went, and the next one is not made yet."""
        return sum(not pod.is_terminating or not self.is_reachable(pod) for pod in self.agents) < self.desired

    def is_serving(self, pod: Pod) -> bool:
        """Whether engines have an agent in it."""
        return is_serving(pod, self.nodes)


def next_step(fleet: Fleet, *, may_roll: bool) -> Step:
    """may_roll: whether this pool has the operator's turn."""
    outdated = [pod for pod in fleet.agents if pod.config_hash != fleet.wanted_hash and not pod.is_terminating]
    if not outdated:
        last = _held_up(fleet, "")  # the last one's successor: until it serves, no other pool may begin
        return Step(None, Rollout(), is_waiting=last is not None and last.reason != reasons.ROLLOUT_STOPPED)
    said = f"{max(0, fleet.desired - len(outdated))} of {fleet.desired} agents run what the spec says"
    reachable = sorted((pod for pod in outdated if fleet.is_reachable(pod)), key=lambda pod: pod.name)
    broken = [pod for pod in reachable if not fleet.is_serving(pod)]
    if broken:
        return _replace(broken[0], said)  # nobody loses anything
    held_up = _held_up(fleet, said)
    if held_up is not None:
        return Step(None, held_up, is_waiting=held_up.reason != reasons.ROLLOUT_STOPPED)
    if not may_roll:
        message = f"{said}: another pool's agents are being replaced, or were not looked at yet: wait"
        return Step(None, Rollout(reason=reasons.WAITING_FOR_OTHER_POOL, message=message))
    if not reachable:
        message = f"{said}: the others are on nodes that are not ready: wait for these nodes"
        return Step(None, Rollout(reason=reasons.ROLLING_OUT, message=message))
    return _replace(reachable[0], said)


def _replace(pod: Pod, said: str) -> Step:
    message = f"{said}: replacing {pod.name} on node {pod.node}"
    return Step(pod, Rollout(reason=reasons.ROLLING_OUT, message=message))


def _held_up(fleet: Fleet, said: str) -> Rollout | None:
    """Why no serving agent may be taken away now."""
    living = sum(not pod.is_terminating for pod in fleet.agents)
    missing = [
        pod
        for pod in fleet.agents
        if not fleet.is_serving(pod)
        and fleet.is_reachable(pod)
        and not (pod.is_terminating and living >= fleet.desired)  # nobody comes after it
    ]
    if missing:
        return _waiting(missing, said, fleet)
    if len(fleet.agents) >= fleet.desired:
        return None
    if fleet.short_seconds > STOPPED_AFTER_SECONDS:
        message = (
            f"{said}: stopped, since the next agent cannot be made: see condition {reasons.AGENTS_AVAILABLE}, allow "
            f"what it names (a quota, an admission policy) or correct the spec"
        )
        return Rollout(reason=reasons.ROLLOUT_STOPPED, message=message)
    return Rollout(reason=reasons.ROLLING_OUT, message=f"{said}: the next agent is being made")


def _waiting(missing: Sequence[Pod], said: str, fleet: Fleet) -> Rollout:
    def waited(pod: Pod) -> float:
        return fleet.short_seconds if pod.is_terminating else fleet.age_seconds.get(pod.uid, 0.0)

    oldest = max(missing, key=waited)
    if waited(oldest) > STOPPED_AFTER_SECONDS:
        does_not = "end: delete it for good if its node is lost" if oldest.is_terminating else "get ready"
        message = (
            f"{said}: stopped, since the agent {oldest.name} on node {oldest.node} does not {does_not}: see condition "
            f"{reasons.AGENTS_AVAILABLE}, correct the spec or the node"
        )
        return Rollout(reason=reasons.ROLLOUT_STOPPED, message=message)
    return Rollout(reason=reasons.ROLLING_OUT, message=f"{said}: waiting for {oldest.name} on node {oldest.node}")


class Turn:
    """At most one pool replaces serving agents at a time: an upgrade of the operator makes all pools outdated at once.

    Invariant: a pool that does not ask for the turn for STOPPED_AFTER_SECONDS, whatever keeps it from that, has it no more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = ""
        self._asked: datetime | None = None

    def take(self, uid: str, now: datetime) -> bool:
        """Whether the pool has the turn now."""
        with self._lock:
            is_late = self._asked is not None and (now - self._asked).total_seconds() > STOPPED_AFTER_SECONDS
            if not self._holder or is_late:
                self._holder = uid
            if self._holder == uid:
                self._asked = now
            return self._holder == uid

    def give_back(self, uid: str) -> None:
        """The pool needs it no more, or is gone, or got stuck."""
        with self._lock:
            if self._holder == uid:
                self._holder = ""
