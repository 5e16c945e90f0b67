"""One look at one pool: gather, plan, apply, status, Events.

Invariant: level-based: what to do follows from what is there, so a reconcile may be cut off anywhere and repeated at any
time; what is remembered between two only saves work. At most one status write each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from kvpool_operator import agent_stats, gathering, names, projections, reasons, status
from kvpool_operator.applying import Applier, Outcome
from kvpool_operator.fence import Fence
from kvpool_operator.finishing import Finisher
from kvpool_operator.former_tier import keys_left
from kvpool_operator.garbage import Collector
from kvpool_operator.kube import Kube, Raw
from kvpool_operator.kube_errors import REFUSALS, ConflictError, ForbiddenError, InvalidError, KubeError, NotFoundError
from kvpool_operator.moments import rfc3339, seconds_since
from kvpool_operator.names import Manifest
from kvpool_operator.observed import Namespace, Node, Observed, Pod, Refusal, Rollout, ValkeyHealth, Workload
from kvpool_operator.plan import PlanInputs, agent, allowed_namespaces, plan
from kvpool_operator.plan.secrets import Generated, build_master, decode, generate
from kvpool_operator.pool import Pool, PoolError, parse_pool
from kvpool_operator.rolling import Roller
from kvpool_operator.settings import Settings
from kvpool_operator.status.condition import Problem, changed
from kvpool_operator.status.problems import ending
from kvpool_operator.story import Storyteller

UNSETTLED_SECONDS = 2.0
"""Until the next look at a pool that is not as it should be."""
UNSETTLED_MAX_SECONDS = 30.0
"""The same while its status stays the same: events of what it consists of lead to a look at once."""
UNSETTLED_SHARE = 0.25
"""Of the time that nothing changed: what heals by time alone is seen at most a quarter of that time late."""
TIER_SECONDS = 15.0
"""Until the next look at a pool with a shared tier: no event tells that a shard or a password is lost."""
REFUSING_SECONDS = 20.0
"""A shard that refuses the login after that was started with a former Secret; a younger one may just be starting."""
RECENT_SECONDS = 600.0
"""Restarts longer ago are history."""

log = logging.getLogger("kvpool.operator.reconcile")
Key = tuple[str, str]


class Healer(Protocol):
    """One step of forming and healing a managed Valkey (`valkey_health.heal`); blocking."""

    def __call__(self, pods: Sequence[Pod], *, shards: int, password: str, fence: Fence) -> ValkeyHealth:
        """What was seen and done."""


class Clock(Protocol):
    """Time as people write it."""

    def __call__(self) -> datetime:
        """Now, in UTC."""


@dataclass(slots=True)
class Memory:
    """What is known of one pool (by uid) from the last time; only saves work."""

    applier: Applier
    replicas: int = 0
    """Valkey pods that the last step of healing wanted; 0 = unknown."""
    changed_at: datetime | None = None
    """When status last became another."""


@dataclass(slots=True, kw_only=True)
class Gathered:
    """What was read in one look."""

    namespaces: tuple[Namespace, ...]
    nodes: tuple[Node, ...]
    pods: tuple[Pod, ...]
    generated: Generated
    refusals: tuple[Refusal, ...]
    """Why there are no nodes here although there may be some."""
    now: datetime
    workloads: tuple[Workload, ...] = field(default=())


class Reconciler:
    """Of all pools; one thread a pool at a time (the queue sees to that)."""

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        *,
        fence: Fence,
        story: Storyteller,
        heal: Healer,
        clock: Callable[[], datetime],
    ) -> None:
        """fence: of all that is changed, also of `kube`'s writes."""
        self._kube = kube
        self._fence = fence
        self._settings = settings
        self._story = story
        self._heal = heal
        self._clock = clock
        self._finisher = Finisher(kube, settings, story)
        self._collector = Collector(kube, operator_namespace=settings.namespace)
        self._roller = Roller(kube, fence=fence, story=story)
        self._memories: dict[str, Memory] = {}
        self._uids: dict[Key, str] = {}

    def expect(self, keys: Iterable[Key]) -> None:
        """Pools that are there: none is rolled before each of them was looked at once."""
        self._roller.expect(keys)

    def collect(self) -> None:
        """Remove what dead pools left."""
        self._collector.collect()

    def reconcile(self, key: Key) -> float | None:
        """Look at one pool; seconds until the next look at the latest, None: the resync will do."""
        try:
            return self._look_at(key)
        finally:
            self._roller.looked(key)

    def _look_at(self, key: Key) -> float | None:
        raw = self._kube.get(names.KIND, *key)
        if raw is None:
            if key in self._uids:  # others are but names in somebody's labels; what they left is for the resync
                self.collect()
            self._forget_others(key, "")
            return None
        self._forget_others(key, raw["metadata"]["uid"])
        now = self._clock()
        uid = raw["metadata"]["uid"]
        if raw["metadata"].get("deletionTimestamp"):
            self._roller.leave(uid)
            return self._end(raw, now)
        if self._settings.watched_namespaces and key[0] not in self._settings.watched_namespaces:
            return None  # made anew meanwhile under the name of one that was going
        try:
            pool = parse_pool(raw)
        except PoolError as error:
            self._roller.leave(uid)
            self._refuse(raw, error, now)
            return None
        if pool.is_paused:
            self._roller.leave(uid)
            self._write_status(pool, status.paused_status(pool, now=rfc3339(now)))
            return None
        try:
            self._tell_keys_left(pool)
            self._finisher.keep_finalizer(pool, raw)
            return self._reconcile_living(pool, now)
        except REFUSALS as error:
            self._roller.leave(uid)
            self._hold_up(pool, error, now)
            raise

    def _end(self, raw: Raw, now: datetime) -> float | None:
        """Deletion is a decision: neither a pause nor a spec that is not understood holds it up."""
        try:
            pool = parse_pool(raw)
        except PoolError as error:
            self._finisher.let_go(raw, error)
            return None
        return self._finisher.step(pool, raw, now)

    def _reconcile_living(self, pool: Pool, now: datetime) -> float | None:
        namespaces = gathering.read_namespaces(self._kube, pool)
        if gathering.is_terminating(namespaces, pool.namespace):
            self._roller.leave(pool.uid)
            return None  # nothing can be made there any more; the pool goes with it
        memory = self._memories.setdefault(pool.uid, Memory(Applier(self._kube)))
        nodes, refusals = self._read_nodes(pool)
        gathered = Gathered(
            namespaces=namespaces,
            nodes=nodes,
            refusals=refusals,
            pods=gathering.read_members(self._kube, pool),
            generated=self._secrets(pool),
            now=now,
        )
        valkey = self._heal_valkey(pool, gathered, memory)
        allowed = allowed_namespaces(pool, namespaces)
        inputs = PlanInputs(allowed=allowed, generated=gathered.generated, valkey_replicas=self._replicas(pool, memory))
        outcome = memory.applier.apply(pool, plan(pool, inputs, self._settings))
        if valkey is not None and ("Secret", pool.namespace, names.valkey_name(pool)) in outcome.live:
            valkey = self._replace_refusing(valkey, gathered)
        gathered.workloads = _workloads(outcome)
        observed = self._observe(pool, gathered, outcome, allowed, valkey)
        observed = replace(observed, rollout=self._roll(pool, observed, gathered))
        written = status.build_status(pool, observed, now=rfc3339(now))
        self._tell(pool, written, observed, outcome, now)
        self._write_status(pool, written)
        if memory.changed_at is None or written != pool.status or (valkey is not None and valkey.actions):
            memory.changed_at = now
        return _next_look(pool, written, now=now, changed_at=memory.changed_at)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _read_nodes(self, pool: Pool) -> tuple[tuple[Node, ...], tuple[Refusal, ...]]:
        """A refusal keeps nothing back that needs no nodes."""
        try:
            return gathering.read_nodes(self._kube, pool), ()
        except InvalidError as error:
            remedy = "spec.agent.nodeSelector selects no nodes: correct it (kubectl get nodes --show-labels)"
            return (), (Refusal(reason=reasons.REQUEST_REFUSED, message=f"{remedy}: {error}"),)
        except ForbiddenError as error:
            remedy = "the operator may not list nodes: give it the ClusterRole of its chart"
            return (), (Refusal(reason=reasons.REQUEST_REFUSED, message=f"{remedy}: {error}"),)

    def _secrets(self, pool: Pool) -> Generated:
        """What was generated for the pool; the master copy is made or completed first."""
        namespace = self._settings.namespace
        raw = self._kube.get("Secret", namespace, names.master_name(pool.uid))
        generated = generate(decode((raw or {}).get("data")))
        wanted = build_master(pool, generated, namespace=namespace)
        if raw is None:
            self._kube.create(wanted)  # a conflict means that somebody else made one: read it next time
        elif raw.get("data") != wanted["data"]:
            self._kube.apply(wanted, uid=raw["metadata"]["uid"])
        return generated

    def _heal_valkey(self, pool: Pool, gathered: Gathered, memory: Memory) -> ValkeyHealth | None:
        if pool.managed is None:
            memory.replicas = 0
            return None
        pods = [pod for pod in gathered.pods if pod.component == names.VALKEY]
        if not pods:
            return None
        password = gathered.generated.operator_password
        health = self._heal(pods, shards=pool.managed.shards, password=password, fence=self._fence)
        memory.replicas = health.replicas
        return health

    def _replace_refusing(self, valkey: ValkeyHealth, gathered: Gathered) -> ValkeyHealth:
        """Shards started with former users serve nobody who has the present Secret, and only a start reads it.

        To be called when their Secret is applied: a shard that starts with a former one would refuse, too.
        """
        replaced = []
        for pod in gathered.pods:
            is_old = seconds_since(pod.created_at, gathered.now) > REFUSING_SECONDS
            if pod.uid in valkey.refusing and is_old and not pod.is_terminating:
                self._kube.delete("Pod", pod.namespace, pod.name, uid=pod.uid)
                replaced.append(f"replaced {pod.name}: it refused the login with the pool's present Secret")
        return replace(valkey, actions=(*valkey.actions, *replaced))

    def _replicas(self, pool: Pool, memory: Memory) -> int:
        """How many Valkey pods there must be: never fewer than there are while it is unknown whether they hold slots."""
        if pool.managed is None:
            return 0
        if memory.replicas:
            return memory.replicas
        raw = self._kube.get("StatefulSet", pool.namespace, names.valkey_name(pool))
        present = int((raw.get("spec") or {}).get("replicas") or 0) if raw else 0
        return max(pool.managed.shards, present)

    def _observe(
        self, pool: Pool, gathered: Gathered, outcome: Outcome, allowed: tuple[str, ...], valkey: ValkeyHealth | None
    ) -> Observed:
        agents = tuple(pod for pod in gathered.pods if pod.component == names.AGENT)
        away = {node.name for node in gathered.nodes if not node.is_ready}
        amiss = not all(pod.is_ready for pod in gathered.pods) or any(
            one.existing < one.desired for one in gathered.workloads
        )
        return Observed(
            nodes=gathered.nodes,
            pods=gathered.pods,
            engines=gathering.read_engines(self._kube, pool, allowed),
            candidates=gathering.read_candidates(self._kube, pool, allowed),
            workloads=gathered.workloads,
            warnings=gathering.read_warnings(self._kube, pool) if amiss else (),
            stats=agent_stats.ask_all([pod for pod in agents if pod.node not in away], gathered.generated.token),
            agent_image=agent.image(pool, self._settings),
            agent_memory_bytes=agent.pod_memory_bytes(pool),
            valkey=valkey,
            refusals=(*gathered.refusals, *outcome.refusals),
            waiting_for_former=", ".join(outcome.going),
        )

    def _roll(self, pool: Pool, observed: Observed, gathered: Gathered) -> Rollout:
        if gathered.refusals:
            self._roller.leave(pool.uid)
            message = f"the nodes are not known, so no agent is replaced: see condition {reasons.SPEC_ACCEPTED}"
            return Rollout(reason=reasons.REQUEST_REFUSED, message=message)
        return self._roller.roll(pool, observed, token=gathered.generated.token, now=gathered.now)

    # --- telling ----------------------------------------------------------------------------------------------------

    def _tell_keys_left(self, pool: Pool) -> None:
        """Before anything of the new spec is applied: afterwards nobody knows any more what the former one named."""
        if names.FINALIZER not in pool.finalizers:
            return
        message = keys_left(pool, self._kube.get("ConfigMap", pool.namespace, names.agent_name(pool)))
        if message:
            once = f"keys left {pool.generation}"
            self._story.tell(names.reference(pool), reasons.KEYS_LEFT, message, is_warning=True, once=once)

    def _tell(self, pool: Pool, written: Manifest, observed: Observed, outcome: Outcome, now: datetime) -> None:
        about = names.reference(pool)
        self._tell_conditions(pool, written)
        for what in outcome.corrected:
            message = f"{what} was changed by somebody else and is put back: change the pool instead"
            self._story.tell(about, reasons.DRIFT_CORRECTED, message, is_warning=True)
        for action in observed.valkey.actions if observed.valkey else ():
            self._story.tell(about, reasons.VALKEY_HEALED, action, is_warning=False)
        self._tell_restarts(about, observed, now)

    def _tell_conditions(self, pool: Pool, written: Manifest) -> None:
        for one in changed(pool.status.get("conditions") or (), written["conditions"]):
            said = f"{one['type']} is {one['status']}: {one['message']}"
            once = f"{one['lastTransitionTime']} {one['reason']}"
            is_warning = one["status"] == "False" and one["reason"] not in reasons.PROGRESS
            self._story.tell(names.reference(pool), one["reason"], said, is_warning=is_warning, once=once)

    def _tell_restarts(self, about: Manifest, observed: Observed, now: datetime) -> None:
        for pod in observed.pods:
            for one in pod.containers:
                if not one.restarts or seconds_since(one.finished_at, now) > RECENT_SECONDS:
                    continue
                message = (
                    f"container {one.name} of pod {pod.name} on node {pod.node} ended ({ending(one)}) and was restarted"
                )
                once = f"{pod.uid} {one.name} {one.restarts}"
                self._story.tell(about, reasons.CONTAINER_RESTARTED, message, is_warning=True, once=once)

    def _hold_up(self, pool: Pool, error: KubeError, now: datetime) -> None:
        """Say what keeps everything from being done."""
        message = f"the API server refuses what this pool needs: allow it, or correct the field that it names: {error}"
        written = status.held_up_status(pool, Problem(reasons.REQUEST_REFUSED, message), now=rfc3339(now))
        self._tell_conditions(pool, written)
        self._write_status(pool, written)

    def _refuse(self, raw: Raw, error: PoolError, now: datetime) -> None:
        meta = raw["metadata"]
        former = raw.get("status") or {}
        wanted = status.refused_status(former, int(meta.get("generation", 0)), str(error), now=rfc3339(now))
        if wanted != former:
            self._apply_status(meta["namespace"], meta["name"], meta["uid"], wanted)

    def _write_status(self, pool: Pool, wanted: Manifest) -> None:
        if wanted != pool.status:
            self._apply_status(pool.namespace, pool.name, pool.uid, wanted)

    def _apply_status(self, namespace: str, name: str, uid: str, wanted: Manifest) -> None:
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"namespace": namespace, "name": name},
            "status": wanted,
        }
        try:
            self._kube.apply(body, uid=uid, subresource="status")
        except (NotFoundError, ConflictError):
            log.info("the pool went meanwhile", extra={"data": {"namespace": namespace, "pool": name}})

    def _forget_others(self, key: Key, uid: str) -> None:
        """Of a pool that is gone or was made anew, nothing is remembered."""
        former = self._uids.get(key, uid)
        if former != uid:
            self._memories.pop(former, None)
            self._roller.forget(former)
            self._finisher.forget(former)
        if uid:
            self._uids[key] = uid
        else:
            self._uids.pop(key, None)


def _workloads(outcome: Outcome) -> tuple[Workload, ...]:
    kinds = ("DaemonSet", "Deployment", "StatefulSet")
    return tuple(projections.workload(raw) for key, raw in outcome.live.items() if key[0] in kinds)


def _next_look(pool: Pool, written: Manifest, *, now: datetime, changed_at: datetime) -> float | None:
    """Of a pool that is not as it should be: soon while it gets on, else after a part of the time that nothing has changed."""
    failing = [one for one in written["conditions"] if one["status"] != "True"]
    if failing:
        unchanged_seconds = 0.0 if _gets_on(failing, now) else (now - changed_at).total_seconds()
        return min(UNSETTLED_MAX_SECONDS, max(UNSETTLED_SECONDS, unchanged_seconds * UNSETTLED_SHARE))
    return None if pool.managed is None and pool.external is None else TIER_SECONDS


def _gets_on(failing: Sequence[Manifest], now: datetime) -> bool:
    """Whether all that fails is on its way by itself, and not for so long that it hardly is."""
    return all(
        one["reason"] in reasons.PROGRESS and seconds_since(one["lastTransitionTime"], now) < RECENT_SECONDS
        for one in failing
    )
