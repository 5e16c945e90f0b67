"""Carries rollouts of agents out.

Invariant: at most one pool has a serving agent taken away at a time, also when the leader changes; what `rollout` decides is
done in two requests, a drain that may fail and a deletion, and neither unless the deletion is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from kvpool_operator import agent_stats, names, reasons, rollout
from kvpool_operator.fence import Fence
from kvpool_operator.first_looks import FirstLooks, Key
from kvpool_operator.kube import Kube
from kvpool_operator.moments import seconds_since
from kvpool_operator.observed import Observed, Pod, Rollout, Workload
from kvpool_operator.pool import Pool
from kvpool_operator.story import Storyteller

DRAIN_SECONDS = 5.0
NOT_ACTED_ON = Rollout(
    reason=reasons.ROLLING_OUT, message="the DaemonSet controller has not acted on the newest template yet: wait"
)


class Roller:
    """Of all pools, for one term of leading."""

    def __init__(self, kube: Kube, *, fence: Fence, story: Storyteller) -> None:
        self._kube = kube
        self._fence = fence
        self._story = story
        self._turn = rollout.Turn()
        self._first_looks = FirstLooks()
        self._short_since: dict[str, datetime] = {}
        """By pool uid: when an agent was first missing that the DaemonSet has yet to make."""

    def expect(self, keys: Iterable[Key]) -> None:
        """Pools that are there: none is rolled before each of them was looked at once."""
        self._first_looks.expect(keys)

    def looked(self, key: Key) -> None:
        """A pool was looked at, well or not."""
        self._first_looks.looked(key)

    def leave(self, uid: str) -> None:
        """A pool that cannot be rolled now, whatever the reason, keeps no other from it."""
        self._turn.give_back(uid)

    def forget(self, uid: str) -> None:
        """A pool is gone."""
        self.leave(uid)
        self._short_since.pop(uid, None)

    def roll(self, pool: Pool, observed: Observed, *, token: str, now: datetime) -> Rollout:
        """Replace an outdated agent if one may go now."""
        workload = observed.workload("DaemonSet")
        if workload is None:
            return NOT_ACTED_ON
        fleet = self._fleet(pool, workload, observed, now)
        if not workload.is_current:
            self._hold_turn(pool, fleet, now)
            return NOT_ACTED_ON
        step = self._step(pool, fleet, now)
        if step.victim is not None:
            self._replace(pool, step.victim, fleet, token)
        return step.rollout

    def _fleet(self, pool: Pool, workload: Workload, observed: Observed, now: datetime) -> rollout.Fleet:
        agents = observed.pods_of(names.AGENT)
        fleet = rollout.Fleet(
            agents=agents,
            desired=workload.desired,
            wanted_hash=workload.config_hash,
            nodes={node.name: node for node in observed.nodes},
            age_seconds={pod.uid: seconds_since(pod.created_at, now) for pod in agents},
        )
        return replace(fleet, short_seconds=self._short_seconds(pool, fleet, now))

    def _short_seconds(self, pool: Pool, fleet: rollout.Fleet, now: datetime) -> float:
        if not fleet.is_short:
            self._short_since.pop(pool.uid, None)
            return 0.0
        return (now - self._short_since.setdefault(pool.uid, now)).total_seconds()

    def _step(self, pool: Pool, fleet: rollout.Fleet, now: datetime) -> rollout.Step:
        may_roll = fleet.is_outdated and self._first_looks.are_done and self._turn.take(pool.uid, now)
        step = rollout.next_step(fleet, may_roll=may_roll)
        if step.needs_turn:
            self._hold_turn(pool, fleet, now)
        else:
            self._turn.give_back(pool.uid)
        return step

    def _hold_turn(self, pool: Pool, fleet: rollout.Fleet, now: datetime) -> None:
        """A former leader may have given it: also to a pool whose template this one has just changed."""
        if not self._first_looks.are_done and rollout.next_step(fleet, may_roll=False).needs_turn:
            self._turn.take(pool.uid, now)

    def _replace(self, pool: Pool, victim: Pod, fleet: rollout.Fleet, token: str) -> None:
        if fleet.is_serving(victim) and victim.ip:
            # a drained agent serves no engine: one that a policy keeps from being replaced goes on instead
            self._kube.delete("Pod", victim.namespace, victim.name, uid=victim.uid, dry_run=True)
            agent_stats.drain(victim.ip, token, DRAIN_SECONDS, fence=self._fence)
        self._kube.delete("Pod", victim.namespace, victim.name, uid=victim.uid)
        message = f"replacing agent {victim.name} on node {victim.node}: its template is outdated"
        self._story.tell(
            names.reference(pool), reasons.AGENT_REPLACED, message, is_warning=False, once=f"replaced {victim.uid}"
        )
