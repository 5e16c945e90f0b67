"""The end of a pool whose keys lie in somebody else's Valkey.

Pure. Invariant: every state of the world leads to the finalizer's removal, at the latest GIVE_UP_SECONDS after an operator began
to see to it: one that was away while the pool was deleted has all of its time. Keys are removed only when no agent can write new
ones, as far as agents can be reached.
"""

from __future__ import annotations

import enum
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpool_operator import names, reasons
from kvpool_operator.observed import Pod, WarningEvent
from kvpool_operator.valkey.acl import escape_glob

AGENTS_SECONDS = 25.0
"""Agents that are still there then are on nodes that are away: they cannot be waited for."""
GIVE_UP_SECONDS = 100.0
"""Agents, a pod's start, 40 s of removing keys, and a busy node."""


class Act(enum.Enum):
    """What to do next."""

    REMOVE_AGENTS = "remove agents"
    WAIT = "wait"
    CREATE_JOB = "create job"
    FINISH = "finish"
    """Remove the finalizer; the garbage collector does the rest."""


@dataclass(frozen=True, slots=True)
class Step:
    """`reason` and `message`: the Event that goes with it; "" = none."""

    act: Act
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is there while a pool goes. `job`: the purge Job as the API server has it.

    removing_seconds: since this operator began to see to the pool's end.
    """

    removing_seconds: float
    is_namespace_terminating: bool
    has_finalizer: bool
    must_purge: bool
    has_daemon_set: bool
    agents: tuple[Pod, ...]
    job: Mapping[str, Any] | None
    is_job_ours: bool
    job_message: str
    key_prefix: str


def next_step(scene: Scene) -> Step:
    """What to do next."""
    if not scene.has_finalizer or not scene.must_purge:
        return Step(Act.FINISH)
    if scene.is_namespace_terminating:
        why = "its namespace is being deleted, so no Job can be made there"
        return Step(Act.FINISH, reasons.KEYS_LEFT, left(scene.key_prefix, why))
    if scene.removing_seconds > GIVE_UP_SECONDS:
        why = f"purging took too long: {scene.job_message}" if scene.job_message else "purging took too long"
        return Step(Act.FINISH, reasons.KEYS_LEFT, left(scene.key_prefix, why))
    if scene.has_daemon_set or (scene.agents and scene.removing_seconds < AGENTS_SECONDS):
        return Step(Act.REMOVE_AGENTS)
    if scene.job is None:
        return Step(Act.CREATE_JOB, reasons.PURGING, f"removing keys that begin with {scene.key_prefix!r} from Valkey")
    if not scene.is_job_ours:
        return Step(
            Act.FINISH, reasons.KEYS_LEFT, left(scene.key_prefix, "a Job of another owner has the purge Job's name")
        )
    return _after_job(scene, scene.job)


def _after_job(scene: Scene, job: Mapping[str, Any]) -> Step:
    conditions = {one.get("type"): one for one in (job.get("status") or {}).get("conditions") or ()}
    if conditions.get("Complete", {}).get("status") == "True":
        return Step(Act.FINISH, reasons.KEYS_PURGED, scene.job_message or "the pool's keys are removed from Valkey")
    if has_failed(job):
        why = scene.job_message or conditions["Failed"].get("message", "") or "the purge Job failed"
        return Step(Act.FINISH, reasons.KEYS_LEFT, left(scene.key_prefix, why))
    return Step(Act.WAIT)


def left(key_prefix: str, why: str) -> str:
    """What is told of keys that nobody removes."""
    pattern = shlex.quote(escape_glob(key_prefix) + "*")
    return (
        f"keys that begin with {key_prefix!r} may be left in Valkey: {why}: remove them with "
        f"valkey-cli --scan --pattern {pattern} and UNLINK, or let them be evicted"
    )


def has_failed(job: Mapping[str, Any]) -> bool:
    """Whether a Job gave up."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Failed" and one.get("status") == "True" for one in conditions)


def job_message(pods: tuple[Pod, ...]) -> str:
    """What the purge Job's pod said at its end (`kvpool_operator.purge`: one line of JSON), for people."""
    said = [one.exit_message for pod in pods if pod.component == names.PURGE for one in pod.containers]
    return "; ".join(_readable(text) for text in said if text)


def refusal_message(job: Mapping[str, Any], warnings: Iterable[WarningEvent]) -> str:
    """Why a Job never had a pod, such as a quota: its own condition only says that the time was up."""
    told = [one for one in warnings if one.object_uid == job["metadata"]["uid"] and one.reason == "FailedCreate"]
    newest = max(told, key=lambda one: one.last_seen, default=None)
    return f"the purge Job's pod is refused: {newest.message}" if newest else ""


def _readable(text: str) -> str:
    try:
        told = json.loads(text)
        removed = f"{told['deleted']} keys removed"
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())
    left = f", about {told['remaining_estimate']} left" if told.get("remaining_estimate") else ""
    why = f": {told['message']}" if told.get("message") else ""
    return removed + left + why
