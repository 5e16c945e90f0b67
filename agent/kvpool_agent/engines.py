"""The engines of this node: who is connected, and the domain that their parts add up to.

Pure. Invariant: an engine's domain is known exactly while its scheduler and all its workers are registered and agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvpool_agent.pod_identity import PodIdentity
from kvpool_core.identity import combine
from kvpool_core.wire import EngineInfo, GroupLayout, Hello, RegisterScheduler, RegisterWorker

PENDING = "pending"
KNOWN = "known"
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class DomainState:
    """What the engine is told of its domain."""

    state: str = PENDING
    domain: bytes = b""
    reason: str = ""
    groups: tuple[GroupLayout, ...] = ()


@dataclass(slots=True)
class Engine:
    """One vLLM engine. `layouts`: groups as last known, kept while the domain is pending again. `pod`: None where unknown."""

    engine_id: str
    dp_rank: int
    world_size: int
    hello: Hello
    pod: PodIdentity | None = None
    scheduler: RegisterScheduler | None = None
    workers: dict[int, RegisterWorker] = field(default_factory=dict)
    domain: DomainState = field(default_factory=DomainState)
    layouts: Mapping[int, GroupLayout] = field(default_factory=dict)
    scheduler_connected: bool = False
    requests: int = 0
    prompt_tokens: int = 0

    @property
    def was_known(self) -> bool:
        """Whether its domain was known at any time, so that messages under way may still name it."""
        return bool(self.layouts)

    def mismatch(self, hello: Hello, pod: PodIdentity | None) -> str:
        """Why a further connection cannot belong to this engine; "" when it can."""
        if pod != self.pod:
            return f"engine {self.engine_id} is connected from another pod: give each engine its own id"
        if (hello.dp_rank, hello.world_size) != (self.dp_rank, self.world_size):
            mine, other = f"dp_rank {self.dp_rank}, world_size {self.world_size}", (hello.dp_rank, hello.world_size)
            return f"engine {self.engine_id} is connected with {mine}, not {other}: give each engine its own id"
        return ""

    def settle(self, fits: Callable[[int], bool]) -> bool:
        """Work the domain out anew; whether it changed."""
        former = self.domain
        self.domain = resolve(self.world_size, self.scheduler, self.workers, fits)
        if self.domain.state == KNOWN:
            self.layouts = {layout.group: layout for layout in self.domain.groups}
        return self.domain != former

    def info(self) -> EngineInfo:
        """What the router needs to know."""
        return EngineInfo(
            engine_id=self.engine_id,
            endpoint=self.hello.endpoint,
            dp_rank=self.dp_rank,
            served_names=self.hello.served_names,
            block_size=self.hello.block_size,
            hash_seed=self.hello.hash_seed,
            domain=self.domain.domain,
            groups=list(self.domain.groups),
            connected=self.scheduler_connected,
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
        )


def resolve(
    world_size: int,
    scheduler: RegisterScheduler | None,
    workers: Mapping[int, RegisterWorker],
    fits: Callable[[int], bool],
) -> DomainState:
    """The domain that the registered parts add up to. fits(payload_bytes): whether the arena can hold such a block."""
    if scheduler is not None and scheduler.problem:
        return DomainState(REFUSED, reason=f"the engine cannot be identified: {scheduler.problem}")
    registered = [workers[rank] for rank in sorted(workers)]
    problem = _disagreement(registered, fits)
    if problem:
        return DomainState(REFUSED, reason=problem)
    if scheduler is None or len(registered) < world_size:
        return DomainState(reason=f"{len(registered)} of {world_size} workers registered")
    domain = combine(
        scheduler_part=scheduler.part,
        shared_part=registered[0].shared_part,
        rank_parts=[worker.rank_part for worker in registered],
    )
    return DomainState(KNOWN, domain=domain, groups=tuple(registered[0].groups))


def _disagreement(workers: list[RegisterWorker], fits: Callable[[int], bool]) -> str:
    """Why these workers cannot store together; "" when they can."""
    for worker in workers[1:]:
        if worker.shared_part != workers[0].shared_part:
            return "the workers describe different page encodings: are all ranks of one version and configuration?"
        if worker.groups != workers[0].groups:
            return "the workers register different KV-cache groups: are all ranks of one version and configuration?"
    for worker in workers[:1]:
        for layout in worker.groups:
            if not fits(layout.payload_bytes):
                return f"a block of group {layout.group} has {layout.payload_bytes} bytes and does not fit the arena"
    return ""
