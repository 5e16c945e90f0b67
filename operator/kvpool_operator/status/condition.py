"""Conditions: how they are made and how they follow on each other.

Invariant: `lastTransitionTime` changes exactly when `status` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MESSAGE_MAX = 2000
"""Longer ones help nobody; the schema allows more."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition as it is now. `status`: True | False | Unknown."""

    type: str
    status: str
    reason: str
    message: str

    @property
    def is_true(self) -> bool:
        """Whether it holds."""
        return self.status == "True"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something is not as it should be. `node`: where, "" when it is about no single node."""

    reason: str
    message: str
    node: str = ""


def holds(kind: str, reason: str, message: str) -> Condition:
    """A condition that is True."""
    return Condition(kind, "True", reason, message)


def fails(kind: str, problem: Problem) -> Condition:
    """A condition that is False."""
    return Condition(kind, "False", problem.reason, problem.message)


def unknown(kind: str, reason: str, message: str) -> Condition:
    """A condition of which nothing is known."""
    return Condition(kind, "Unknown", reason, message)


def merge(
    former: Iterable[Mapping[str, Any]], conditions: Iterable[Condition], *, generation: int, now: str
) -> list[dict[str, Any]]:
    """The conditions as they are written; times are kept where the status is the former one."""
    known = {one.get("type"): one for one in former}
    return [_written(condition, known.get(condition.type), generation=generation, now=now) for condition in conditions]


def _written(condition: Condition, former: Mapping[str, Any] | None, *, generation: int, now: str) -> dict[str, Any]:
    kept = former is not None and former.get("status") == condition.status and former.get("lastTransitionTime")
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message[:MESSAGE_MAX],
        "lastTransitionTime": kept or now,
        "observedGeneration": generation,
    }


def changed(former: Iterable[Mapping[str, Any]], written: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Conditions whose status or reason is another than before: what Events tell."""
    before = {one.get("type"): (one.get("status"), one.get("reason")) for one in former}
    return [one for one in written if before.get(one["type"]) != (one["status"], one["reason"])]
