"""How far the arena is, as probes, metrics and the operator see it.

Invariant: exactly one state at a time; while it is not `ready`, `waiting_for` says what for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.pod_identity import PodIdentity

WAITING = "waiting"
"""For the socket folder's lock or the holder."""
PENDING = "pending"
"""A former arena still takes the memory that the new one needs."""
PREFAULTING = "prefaulting"
READY = "ready"
STATES = (WAITING, PENDING, PREFAULTING, READY)

ARENA_PENDING = "ArenaPending"
"""Reason under which operator and probes name the state `pending`."""


@dataclass(frozen=True, slots=True)
class Mapper:
    """An engine's process that still maps a former arena."""

    engine_id: str
    role: str
    rank: int
    pod: PodIdentity | None

    def __str__(self) -> str:
        """For people: the pod where it is known."""
        where = f" of pod {self.pod.namespace}/{self.pod.name}" if self.pod is not None else ""
        return f"{self.role} {self.rank} of engine {self.engine_id}{where}"


@dataclass(slots=True)
class ArenaStatus:
    """The arena's state. `held_by`: who still maps a former arena while this one is pending."""

    metrics: AgentMetrics
    capacity_bytes: int
    state: str = WAITING
    waiting_for: str = "start"
    prefaulted_bytes: int = 0
    held_by: list[Mapper] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.metrics.arena_bytes.set(self.capacity_bytes)
        self.metrics.arena_prefaulted_bytes.set_function(lambda: self.prefaulted_bytes)
        self._show()

    def wait(self, waiting_for: str) -> None:
        """Something else than memory is missing."""
        self._enter(WAITING, waiting_for)

    def pend(self, waiting_for: str, held_by: list[Mapper]) -> None:
        """There is no room for the arena yet."""
        self._enter(PENDING, waiting_for, held_by)

    def prefault(self, prefaulted_bytes: int) -> None:
        """The holder fills it with pages."""
        self.prefaulted_bytes = prefaulted_bytes
        self._enter(PREFAULTING, f"the arena's memory: {prefaulted_bytes} of {self.capacity_bytes} bytes are there")

    def serve(self) -> None:
        """It is complete."""
        self.prefaulted_bytes = self.capacity_bytes
        self._enter(READY, "")

    @property
    def problem(self) -> str:
        """Why engines cannot use it yet, for /readyz; "" when they can."""
        if self.state == PENDING:
            return f"{ARENA_PENDING}: {self.waiting_for}"
        return "" if self.state == READY else f"waiting for {self.waiting_for}"

    def report(self) -> dict[str, Any]:
        """Its part of /v1/stats."""
        return {
            "state": self.state,
            "reason": ARENA_PENDING if self.state == PENDING else "",
            "waiting_for": self.waiting_for,
            "capacity_bytes": self.capacity_bytes,
            "prefaulted_bytes": self.prefaulted_bytes,
            "used_bytes": 0,
            "held_by": [asdict(mapper) for mapper in self.held_by],
        }

    def _enter(self, state: str, waiting_for: str, held_by: list[Mapper] | None = None) -> None:
        self.state, self.waiting_for, self.held_by = state, waiting_for, held_by or []
        self._show()

    def _show(self) -> None:
        for state in STATES:
            self.metrics.arena_state.labels(state).set(state == self.state)
