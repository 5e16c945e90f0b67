"""What all agents told about engines and blocks, joined: one AgentView for each agent over one PrefixIndex.

Invariant: at any time an agent is represented by exactly one view, complete as of some point of its stream; a new
snapshot grows beside it under holders of its own and takes its place in one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool_core.wire import EngineInfo, GroupLayout, TierBlocks
from kvpool_router.addresses import canonical_address
from kvpool_router.logs import fields
from kvpool_router.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

GPU = "gpu"
RAM = "ram"
VALKEY = "valkey"

_NOTHING_TO_INDEX = -1

_TierFilter = Callable[[str, bytes, int], bool]


def routing_group(groups: Iterable[GroupLayout]) -> GroupLayout | None:
    """The group whose blocks routing looks at: the lowest with full attention; None when there is none."""
    full = [layout for layout in groups if layout.window_blocks == 0]
    return min(full, key=lambda layout: layout.group) if full else None


def _group_number(groups: list[GroupLayout]) -> int | None:
    """The routing group's number; None while the engine's groups are unknown."""
    if not groups:
        return None
    layout = routing_group(groups)
    return _NOTHING_TO_INDEX if layout is None else layout.group


@dataclass(frozen=True, slots=True)
class EngineRef:
    """An engine that an agent reported as connected."""

    agent: str
    info: EngineInfo

    @property
    def group(self) -> int:
        """The KV-cache group that routing looks at; 0 until the engine's groups are known."""
        return _group_number(self.info.groups) or 0

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of that group."""
        layout = routing_group(self.info.groups)
        return layout.tokens_per_block if layout is not None else self.info.block_size


class AgentView:
    """One agent's engines, and the holders under which its blocks are in the index."""

    def __init__(self, index: PrefixIndex, domain_groups: dict[bytes, int]) -> None:
        self._index = index
        self._domain_groups = domain_groups
        self.engines: dict[str, EngineInfo] = {}
        self._gpu: dict[tuple[str, int], int] = {}
        self._tiers: dict[tuple[str, bytes, int], int] = {}
        self._borrowed: set[tuple[str, bytes, int]] = set()

    def gpu_holder(self, engine_id: str, group: int) -> int:
        """The engine's holder, 0 while it has none."""
        return self._gpu.get((engine_id, group), 0)

    def tier_holder(self, tier: str, domain: bytes, group: int) -> int:
        """The holder of a domain's blocks in `ram` or `valkey`, 0 while there is none."""
        return self._tiers.get((tier, domain, group), 0)

    def holders_of(self, tier: str) -> list[int]:
        """All holders of a tier."""
        if tier == GPU:
            return list(self._gpu.values())
        return [holder for (name, _, _), holder in self._tiers.items() if name == tier]

    # --- engines ------------------------------------------------------------------------------------------------

    def put_engine(self, info: EngineInfo) -> None:
        """Learn or renew an engine; a disconnected one is forgotten together with its `gpu` blocks."""
        self.engines.pop(info.engine_id, None)
        if not info.connected:
            self._retire_gpu(info.engine_id)
            return
        self.engines[info.engine_id] = info
        group = _group_number(info.groups)
        if group is None:
            return
        self._retire_gpu(info.engine_id, keep=group)
        if info.domain:
            self._domain_groups[info.domain] = group
            self._retire_tiers(lambda _, domain, other: domain == info.domain and other != group)

    # --- blocks -------------------------------------------------------------------------------------------------

    def store(self, blocks: TierBlocks) -> None:
        """These blocks are held now."""
        if self._is_indexed(blocks):
            self._index.add(self._holder(blocks), blocks.hashes)

    def clear(self, blocks: TierBlocks) -> None:
        """Nothing of this engine (`gpu`), or of this domain in this tier, is held any more; no domain: of the tier."""
        if blocks.tier == GPU:
            self._retire_gpu(blocks.engine_id)
            return
        self._retire_tiers(lambda tier, domain, _: tier == blocks.tier and blocks.domain in (b"", domain))

    def remove(self, blocks: TierBlocks) -> None:
        """These blocks are not held any more."""
        self._index.discard(self._known_holder(blocks), blocks.hashes)

    def _is_indexed(self, blocks: TierBlocks) -> bool:
        """False for groups that routing never looks at; unknown groups are kept until they are known."""
        if blocks.tier == GPU:
            info = self.engines.get(blocks.engine_id)
            group = _group_number(info.groups) if info is not None else None
        else:
            group = self._domain_groups.get(blocks.domain)
        return group is None or group == blocks.group

    def _known_holder(self, blocks: TierBlocks) -> int:
        if blocks.tier == GPU:
            return self.gpu_holder(blocks.engine_id, blocks.group)
        return self.tier_holder(blocks.tier, blocks.domain, blocks.group)

    def _holder(self, blocks: TierBlocks) -> int:
        holder = self._known_holder(blocks)
        if holder:
            return holder
        holder = self._index.acquire()
        if blocks.tier == GPU:
            self._gpu[blocks.engine_id, blocks.group] = holder
        else:
            self._tiers[blocks.tier, blocks.domain, blocks.group] = holder
        return holder

    # --- forgetting ---------------------------------------------------------------------------------------------

    def borrow_valkey(self, old: AgentView) -> None:
        """Go on with the `valkey` hints of the agent's former process: Valkey's content outlives an agent."""
        self._borrowed = {key for key in old._tiers if key[0] == VALKEY}
        self._tiers.update({key: old._tiers[key] for key in self._borrowed})

    def keep_borrowed(self, old: AgentView) -> None:
        """This view takes the place of `old`: what it borrowed is its own now."""
        for key in self._borrowed:
            old._tiers.pop(key, None)
        self._borrowed.clear()

    def retire_local(self) -> None:
        """Forget the engines and all `gpu` and `ram` blocks: the agent is gone."""
        self.engines.clear()
        for engine_id in {engine_id for engine_id, _ in self._gpu}:
            self._retire_gpu(engine_id)
        self._retire_tiers(lambda tier, _domain, _group: tier == RAM)

    def retire(self) -> None:
        """Forget everything but what is borrowed."""
        self.retire_local()
        self._retire_tiers(lambda *_: True)

    def _retire_gpu(self, engine_id: str, *, keep: int | None = None) -> None:
        for key in [key for key in self._gpu if key[0] == engine_id and key[1] != keep]:
            self._index.retire(self._gpu.pop(key))

    def _retire_tiers(self, matches: _TierFilter) -> None:
        for key in [key for key in self._tiers if matches(*key)]:
            holder = self._tiers.pop(key)
            if key not in self._borrowed:
                self._index.retire(holder)


@dataclass(slots=True)
class AgentState:
    """How far an agent's stream is. `lost_at`: monotonic seconds since when it is not in step, None while it is."""

    view: AgentView
    boot_id: bytes = b""
    lost_at: float | None = 0.0
    ever_synced: bool = False
    dropped: bool = False


class FleetIndex:
    """All agents' views, and the questions that routing asks."""

    def __init__(self, index: PrefixIndex, agents: Iterable[str]) -> None:
        self.index = index
        self._domain_groups: dict[bytes, int] = {}
        self._agents = {name: AgentState(AgentView(index, self._domain_groups)) for name in agents}
        self._engines: dict[str, dict[tuple[str, int], EngineRef]] = {}
        self._conflicts: set[tuple[str, int]] = set()

    # --- the fleet's side ---------------------------------------------------------------------------------------

    def add_agent(self, agent: str) -> None:
        """An agent belongs to the fleet, nothing known of it yet; what was known of one that came back stays."""
        self._agents.setdefault(agent, AgentState(AgentView(self.index, self._domain_groups)))

    def remove_agent(self, agent: str) -> None:
        """An agent is gone for good, and all that it told with it."""
        state = self._agents.pop(agent, None)
        if state is not None:
            state.view.retire()
            self._rebuild_engines()

    # --- the streams' side --------------------------------------------------------------------------------------

    def new_view(self, agent: str, boot_id: bytes) -> AgentView:
        """A view to be filled by a snapshot of this agent process."""
        view = AgentView(self.index, self._domain_groups)
        if boot_id != self._agents[agent].boot_id:
            view.borrow_valkey(self._agents[agent].view)
        return view

    def commit(self, agent: str, view: AgentView, boot_id: bytes) -> None:
        """The snapshot is complete: it takes the former view's place."""
        state = self._agents[agent]
        view.keep_borrowed(state.view)
        state.view.retire()
        self._agents[agent] = AgentState(view, boot_id=boot_id, lost_at=None, ever_synced=True)
        self._rebuild_engines()

    def put_engines(self, agent: str, engines: Iterable[EngineInfo]) -> None:
        """Engines came, changed or went."""
        for info in engines:
            self._agents[agent].view.put_engine(info)
        self._rebuild_engines()

    def clear(self, agent: str, blocks: TierBlocks) -> None:
        """All blocks of an engine, or of a domain in a tier, are gone."""
        self._agents[agent].view.clear(blocks)

    def remove(self, agent: str, blocks: TierBlocks) -> None:
        """Blocks are gone; what one agent misses in Valkey is a miss for all."""
        if blocks.tier == VALKEY:
            self.index.discard(self._valkey_mask(blocks.domain, blocks.group), blocks.hashes)
        else:
            self._agents[agent].view.remove(blocks)

    def store(self, agent: str, blocks: TierBlocks) -> None:
        """Blocks are held now."""
        self._agents[agent].view.store(blocks)

    def lost(self, agent: str, *, now: float) -> None:
        """The stream broke: the view stays, marked stale."""
        state = self._agents[agent]
        if state.lost_at is None:
            state.lost_at = now

    def expire(self, *, now: float, stale_seconds: float) -> list[str]:
        """Drop `gpu` and `ram` of agents lost for too long; their names."""
        gone = [name for name, state in self._agents.items() if _is_expired(state, now, stale_seconds)]
        for name in gone:
            self._agents[name].view.retire_local()
            self._agents[name].dropped = True
        if gone:
            self._rebuild_engines()
        return gone

    def _rebuild_engines(self) -> None:
        self._engines = {}
        claimed: set[tuple[str, int]] = set()
        conflicts: set[tuple[str, int]] = set()
        for name, state in self._agents.items():
            for info in state.view.engines.values():
                address = canonical_address(info.endpoint)
                if not address:
                    continue  # an engine that is not offered to routers
                place = address, info.dp_rank
                (conflicts if place in claimed else claimed).add(place)
                self._engines.setdefault(address, {})[name, info.dp_rank] = EngineRef(name, info)
        self._tell_conflicts(conflicts)

    def _tell_conflicts(self, conflicts: set[tuple[str, int]]) -> None:
        """One line when a conflict begins."""
        for address, rank in sorted(conflicts - self._conflicts):
            claims = [ref for (_, other), ref in self._engines[address].items() if other == rank]
            agents = ", ".join(ref.agent for ref in claims)
            log.warning(
                "several engines claim one address: give each the address where its own API server listens",
                extra=fields(endpoint=address, dp_rank=rank, agents=agents),
            )
        self._conflicts = conflicts

    # --- routing's side -----------------------------------------------------------------------------------------

    def agent_states(self) -> dict[str, AgentState]:
        """All agents by name."""
        return dict(self._agents)

    def in_step(self) -> bool:
        """Whether anything that the agents told may be believed."""
        return any(not state.dropped and state.ever_synced for state in self._agents.values())

    def engines_at(self, address: str, agent: str) -> list[EngineRef]:
        """Engines that serve `address`, one for each DP rank; of this agent, or of any when `agent` is empty."""
        by_rank: dict[int, EngineRef] = {}
        for (name, rank), ref in self._engines.get(address, {}).items():
            if agent in ("", name):
                by_rank.setdefault(rank, ref)
        return [by_rank[rank] for rank in sorted(by_rank)]

    def holder_masks(self, ref: EngineRef, *, shared_tiers: bool) -> tuple[int, int, int]:
        """Masks of the engine's `gpu`, `ram` and `valkey` holders; the latter two 0 unless `shared_tiers`."""
        view = self._agents[ref.agent].view
        gpu = view.gpu_holder(ref.info.engine_id, ref.group)
        if not shared_tiers or not ref.info.domain:
            return gpu, 0, 0
        ram = view.tier_holder(RAM, ref.info.domain, ref.group)
        return gpu, ram, self._valkey_mask(ref.info.domain, ref.group)

    def _valkey_mask(self, domain: bytes, group: int) -> int:
        mask = 0
        for state in self._agents.values():
            mask |= state.view.tier_holder(VALKEY, domain, group)
        return mask


def _is_expired(state: AgentState, now: float, stale_seconds: float) -> bool:
    return state.ever_synced and not state.dropped and state.lost_at is not None and now - state.lost_at > stale_seconds
