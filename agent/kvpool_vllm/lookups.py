"""What the scheduler side knows of each request's blocks: asked once by a Prefetch, answered by Verdicts.

Invariant: reading it never waits. A request moves on from RETRY at its deadline at the latest, and a request whose load
failed sees only misses until it is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult

from kvpool_core import wire
from kvpool_vllm.arena_view import Placement
from kvpool_vllm.group_keying import is_answer_to
from kvpool_vllm.lease_wear import LeaseWear, Reliance
from kvpool_vllm.settings import Settings

VERDICT_SHARE = 0.05
VERDICT_LONGEST_SECONDS = 0.5
"""An agent on a busy node may answer late: up to 5 % of what recomputing takes, half a second at most, is worth the wait."""
FETCH_SHARE = 0.8
PENDING_GRACE_SECONDS = 0.1
"""Beyond the agent's own limit for a fetch (0.8 of recomputing), before the engine stops waiting by itself."""


def patience_for(recompute_seconds: float | None, settings: Settings) -> tuple[float, float]:
    """Seconds to wait for a first verdict, and for everything; None: the engine's prefill rate is not known yet."""
    if recompute_seconds is None:
        return settings.verdict_deadline_seconds, settings.pending_deadline_seconds
    share = min(VERDICT_SHARE * recompute_seconds, VERDICT_LONGEST_SECONDS)
    verdict = max(settings.verdict_deadline_seconds, share)
    pending = min(settings.pending_deadline_seconds, FETCH_SHARE * recompute_seconds + PENDING_GRACE_SECONDS)
    return verdict, max(verdict, pending)


@dataclass(slots=True)
class Lookup:
    """One attempt of one request; all times time.monotonic() seconds.

    `index`: key -> (position of its group in the Prefetch, position in the group). `sizes`: keys of each group.
    `session`: the connection it went over.
    """

    rid: int
    request_id: str
    verdict_deadline: float
    pending_deadline: float
    index: dict[bytes, tuple[int, int]]
    sizes: Sequence[int]
    arena_id: bytes
    wear: LeaseWear
    groups: list[wire.GroupVerdict] = field(default_factory=list)
    local_tokens: int = 0
    session: int = 0
    lease_until_ns: int = 0
    final: bool = False
    incoming: wire.Verdict | None = None
    given_up: bool = False
    loading: bool = False

    @property
    def answered(self) -> bool:
        """Whether a first verdict has come."""
        return bool(self.groups)

    @property
    def name(self) -> str:
        """What stands for the request towards the agent: a client chooses its own id, of any length."""
        return str(self.rid)

    def accept(self, verdict: wire.Verdict) -> None:
        """A verdict came, on the client's thread; it counts from `begin_attempt` on."""
        if is_answer_to(verdict.groups, self.sizes):
            self.incoming = verdict

    def begin_attempt(self) -> None:
        """On the engine's thread, before it looks keys up: all of them are to see one state."""
        verdict, self.incoming = self.incoming, None
        if verdict is not None and not self.given_up:
            self.groups = verdict.groups
            self.lease_until_ns = verdict.lease_until_ns
            self.final = verdict.final

    def give_up(self) -> None:
        """Everything not yet loaded is a miss from now on."""
        self.given_up = True
        self.groups = []

    def state(self, key: bytes) -> LookupResult:
        """The key's state as vLLM's lookup names it."""
        if self.given_up:
            return LookupResult.MISS
        place = self.index.get(key)
        if place is None:
            return LookupResult.MISS
        if not self.groups:
            return LookupResult.RETRY
        group, position = place
        state = self.groups[group].states[position]
        if state == wire.HIT:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if state == wire.PENDING else LookupResult.MISS

    def placement(self, key: bytes) -> Placement:
        """Where a HIT lies."""
        group, position = self.index[key]
        verdict = self.groups[group]
        return Placement(self.arena_id, verdict.slots[position], verdict.generations[position])

    def tier(self, key: bytes) -> str:
        """The tier where the key lay when the request arrived."""
        group, position = self.index[key]
        return wire.TIER_NAMES.get(self.groups[group].tiers[position], "none")

    def is_overdue(self, now: float) -> bool:
        """Whether it is too late to wait any longer for what is missing."""
        if self.given_up or self.final:
            return False
        return now >= (self.pending_deadline if self.answered else self.verdict_deadline)

    def reliance(self, now_ns: int, step: int) -> Reliance:
        """Whether leased slots can be relied upon in this step of the engine."""
        has_hits = any(wire.HIT in group.states for group in self.groups)
        return self.wear.judge(
            lease_until_ns=self.lease_until_ns if has_hits else None, final=self.final, now_ns=now_ns, step=step
        )

    def held(self) -> list[tuple[int, int]]:
        """(slot, generation) of every leased slot."""
        newest = self.incoming
        return [
            (slot, generation)
            for verdict in (newest.groups if newest is not None else self.groups)
            for state, slot, generation in zip(verdict.states, verdict.slots, verdict.generations, strict=True)
            if state == wire.HIT
        ]


@dataclass(slots=True)
class Patience:
    """How often the agent left a Prefetch unanswered; after several in a row nothing is asked for a while."""

    limit: int
    pause_seconds: float
    in_a_row: int = 0
    paused_until: float = 0.0

    def missed(self, now: float) -> bool:
        """Count a missed verdict; True when a pause begins."""
        self.in_a_row += 1
        if self.in_a_row < self.limit:
            return False
        self.in_a_row = 0
        self.paused_until = now + self.pause_seconds
        return True

    def answered(self) -> None:
        """A verdict came in time."""
        self.in_a_row = 0

    def is_paused(self, now: float) -> bool:
        """Whether the agent is left alone."""
        return now < self.paused_until
