"""Carries out a pool's end.

Invariant: what `deletion` decides is done in one request each, so being killed in between loses nothing; what the API server
refuses for good holds no pool up for longer than `deletion` waits.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from kvpool_operator import deletion, gathering, names, projections, reasons
from kvpool_operator.deletion import Act, Scene
from kvpool_operator.kube import Kube, Raw
from kvpool_operator.kube_errors import (
    REFUSALS,
    AdmissionDownError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from kvpool_operator.ownership import Claim, claim
from kvpool_operator.plan.purge import build_purge_job
from kvpool_operator.pool import Pool, PoolError
from kvpool_operator.settings import Settings
from kvpool_operator.story import Storyteller

POLL_SECONDS = 1.0
AGENT_GRACE_SECONDS = 1
"""No drain: what agents would still write is about to be removed."""


class Finisher:
    """Of any pool."""

    def __init__(self, kube: Kube, settings: Settings, story: Storyteller) -> None:
        self._kube = kube
        self._settings = settings
        self._story = story
        self._began: dict[str, datetime] = {}
        """By pool uid: when this operator first saw that it goes."""
        self._waits_for: dict[str, str] = {}
        """By pool uid: why its purge Job cannot be made for now."""

    def keep_finalizer(self, pool: Pool, raw: Raw) -> None:
        """A living pool has the finalizer exactly when its keys must be purged."""
        if pool.must_purge == (names.FINALIZER in pool.finalizers):
            return
        others = [one for one in pool.finalizers if one != names.FINALIZER]
        self._set_finalizers(raw, [*others, names.FINALIZER] if pool.must_purge else others)

    def step(self, pool: Pool, raw: Raw, now: datetime) -> float | None:
        """One step of the end; seconds until the next one, None when there is none."""
        removing_seconds = (now - self._began.setdefault(pool.uid, now)).total_seconds()
        try:
            return self._step(pool, raw, removing_seconds)
        except REFUSALS as error:
            if removing_seconds <= deletion.GIVE_UP_SECONDS:
                raise
            return self._leave_keys(pool, raw, f"the API server refuses what purging needs: {error}")

    def forget(self, uid: str) -> None:
        """A pool is gone."""
        self._began.pop(uid, None)
        self._waits_for.pop(uid, None)

    def _step(self, pool: Pool, raw: Raw, removing_seconds: float) -> float | None:
        namespace = self._kube.get("Namespace", None, pool.namespace)
        scene, daemon_set, job = self._look(pool, namespace, removing_seconds)
        step = deletion.next_step(scene)
        if step.reason:
            is_warning = step.reason == reasons.KEYS_LEFT
            self._story.tell(names.reference(pool), step.reason, step.message, is_warning=is_warning, once="end")
        actions: dict[Act, Callable[[], float | None]] = {
            Act.WAIT: lambda: POLL_SECONDS,
            Act.REMOVE_AGENTS: lambda: self._remove_agents(pool, daemon_set, scene),
            Act.CREATE_JOB: lambda: self._create_job(pool, raw),
            Act.FINISH: lambda: self._finish(pool, raw, job if scene.is_job_ours else None),
        }
        return actions[step.act]()

    def _leave_keys(self, pool: Pool, raw: Raw, why: str) -> float | None:
        message = deletion.left(names.key_prefix(pool), why)
        self._story.tell(names.reference(pool), reasons.KEYS_LEFT, message, is_warning=True, once="end")
        return self._finish(pool, raw, None)

    def let_go(self, raw: Raw, error: PoolError) -> None:
        """The end of a pool of which nothing is understood but that it goes."""
        meta = raw["metadata"]
        finalizers = meta.get("finalizers") or ()
        if names.FINALIZER not in finalizers:
            return
        message = (
            f"keys may be left in Valkey, since the pool is not understood: {error}: remove those that begin with "
            f"spec.valkey.external.keyPrefix (when empty: kvpool:{meta['namespace']}/{meta['name']}:) with valkey-cli "
            f"--scan and UNLINK, or let them be evicted"
        )
        self._story.tell(names.reference_of(meta), reasons.KEYS_LEFT, message, is_warning=True, once="end")
        self._set_finalizers(raw, [one for one in finalizers if one != names.FINALIZER])

    def _look(self, pool: Pool, namespace: Raw | None, removing_seconds: float) -> tuple[Scene, Raw | None, Raw | None]:
        has_finalizer = names.FINALIZER in pool.finalizers
        spaces = () if namespace is None else (projections.namespace(namespace),)
        daemon_set = self._own("DaemonSet", pool, names.agent_name(pool))
        job = self._kube.get("Job", pool.namespace, names.purge_name(pool))
        pods = gathering.read_pods(self._kube, pool) if has_finalizer else ()
        scene = Scene(
            removing_seconds=removing_seconds,
            is_namespace_terminating=gathering.is_terminating(spaces, pool.namespace),
            has_finalizer=has_finalizer,
            must_purge=pool.must_purge,
            has_daemon_set=daemon_set is not None and not daemon_set["metadata"].get("deletionTimestamp"),
            agents=tuple(pod for pod in pods if pod.component == names.AGENT),
            job=job,
            is_job_ours=job is not None and claim(job["metadata"], pool) is Claim.OURS,
            job_message=deletion.job_message(pods) or self._refusal(pool, job) or self._waits_for.get(pool.uid, ""),
            key_prefix=names.key_prefix(pool),
        )
        return scene, daemon_set, job

    def _refusal(self, pool: Pool, job: Raw | None) -> str:
        if job is None or not deletion.has_failed(job):
            return ""
        return deletion.refusal_message(job, gathering.read_warnings(self._kube, pool))

    def _own(self, kind: str, pool: Pool, name: str) -> Raw | None:
        raw = self._kube.get(kind, pool.namespace, name)
        return raw if raw is not None and claim(raw["metadata"], pool) in (Claim.OURS, Claim.GOING) else None

    def _remove_agents(self, pool: Pool, daemon_set: Raw | None, scene: Scene) -> float:
        if daemon_set is not None and scene.has_daemon_set:
            uid = daemon_set["metadata"]["uid"]
            self._kube.delete("DaemonSet", pool.namespace, names.agent_name(pool), uid=uid)
        for pod in scene.agents:
            self._kube.delete("Pod", pod.namespace, pod.name, uid=pod.uid, grace_seconds=AGENT_GRACE_SECONDS)
        return POLL_SECONDS

    def _create_job(self, pool: Pool, raw: Raw) -> float | None:
        job = build_purge_job(pool, self._settings)
        if job is None:
            return POLL_SECONDS
        try:
            self._kube.create(job)
        except ConflictError:
            return POLL_SECONDS
        except AdmissionDownError as error:
            self._waits_for[pool.uid] = f"the purge Job cannot be made: {error}"
            return POLL_SECONDS
        except (ForbiddenError, InvalidError) as error:
            return self._leave_keys(pool, raw, f"the purge Job is refused: {error}")
        self._waits_for.pop(pool.uid, None)
        return POLL_SECONDS

    def _finish(self, pool: Pool, raw: Raw, job: Raw | None) -> float | None:
        """There is no next step."""
        if job is not None:
            self._kube.delete("Job", pool.namespace, names.purge_name(pool), uid=job["metadata"]["uid"])
        if names.FINALIZER in pool.finalizers:
            self._set_finalizers(raw, [one for one in pool.finalizers if one != names.FINALIZER])
        return None

    def _set_finalizers(self, raw: Raw, finalizers: list[str]) -> None:
        """Only if nobody else changed the pool since it was read: the list is replaced as a whole."""
        former = raw["metadata"]
        meta = {"finalizers": finalizers, "resourceVersion": former["resourceVersion"]}
        try:
            self._kube.merge(names.KIND, former["namespace"], former["name"], {"metadata": meta})
        except NotFoundError:
            return
