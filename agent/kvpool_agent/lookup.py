"""One Prefetch from its arrival to its final verdict.

Invariant: a key is answered HIT only when its slot is READY, verified and leased to the asking request; the final verdict
has no PENDING key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvpool_agent.checksums import Checksums
from kvpool_agent.fetches import Fetches
from kvpool_agent.hints import ValkeyHints
from kvpool_agent.load_estimate import Judgement, is_worth_fetching, judge, next_look_seconds, recompute_seconds
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.prefetch import (
    ABSENT,
    FETCHING,
    LOCAL,
    RAM,
    UNKNOWN,
    UNVERIFIED,
    VALKEY,
    GroupBlocks,
    Plan,
    limit_for_bytes,
    make_plan,
    usable_boundary,
)
from kvpool_agent.slot import Slot
from kvpool_agent.slot_store import SlotStore
from kvpool_agent.valkey_tier import BlockKey
from kvpool_core import wire
from kvpool_core.slot_table import READY
from kvpool_core.slot_table import UNVERIFIED as UNVERIFIED_FLAG
from kvpool_core.wire import GroupKeys, GroupLayout, GroupVerdict, Prefetch, StoreKey, Verdict

ROUNDS_MAX = 6
"""Existence, verification and fetching each change what is known; then the plan is made anew, this often at most."""
EXISTS_TIMEOUT_SECONDS = 0.2
EXISTS_FRACTION = 0.1
EXISTS_TIMEOUT_MIN_SECONDS = 0.02
"""Asking for existence takes a tenth of the time to recompute, between 20 and 200 ms."""


@dataclass(frozen=True, slots=True)
class LookupServices:
    """What a lookup works with. `fetches` None: no Valkey."""

    store: SlotStore
    checksums: Checksums
    fetches: Fetches | None
    hints: ValkeyHints
    metrics: AgentMetrics
    lease_ns: int
    lease_limit_bytes: int


@dataclass(slots=True)
class _Group:
    """A group of the request and what has been learnt of its keys: `in_valkey` by block number."""

    keys: GroupKeys
    layout: GroupLayout
    in_valkey: dict[int, bool] = field(default_factory=dict)
    slots: list[Slot | None] = field(default_factory=list)
    arrival: bytes = b""


class Lookup:
    """State of one Prefetch."""

    def __init__(
        self,
        services: LookupServices,
        engine_id: str,
        message: Prefetch,
        layouts: Mapping[int, GroupLayout],
        send: Callable[[Verdict], None],
    ) -> None:
        self._services = services
        self._engine_id = engine_id
        self._message = message
        self._send = send
        self._started = time.monotonic()
        self._groups = [_Group(keys, layouts[keys.group]) for keys in message.groups]
        self._changed = asyncio.Event()
        self._waiting: set[int] = set()
        self._arrived_bytes = 0
        self._may_verify = True
        self._use_valkey = self._may_use_valkey()

    # --- the first answer, at once ----------------------------------------------------------------------------------

    def begin(self, *, may_wait: bool) -> bool:
        """Answer what is known now; whether that was final. `may_wait` False: nothing beyond RAM is looked for."""
        if not may_wait:
            self._settle_for_ram()
        blocks = self._survey()
        for group, found in zip(self._groups, blocks, strict=True):
            group.arrival = found.presence
        plan = self._plan(blocks)
        if self._use_valkey and not self._is_worth_asking(blocks, plan):
            self._use_valkey = False
            self._services.metrics.fetches_declined.labels("before_asking").inc()
            blocks = self._survey()
            plan = self._plan(blocks)
        is_final = self._is_settled(blocks, plan)
        self._answer(plan, final=is_final)
        self._touch()
        return is_final

    async def finish(self) -> None:
        """Find out the rest, fetch it, and send the final verdict."""
        for _round in range(ROUNDS_MAX):
            blocks = self._survey()
            plan = self._plan(blocks)
            if self._is_settled(blocks, plan):
                break
            await self._learn(blocks, plan)
        else:
            self._settle_for_ram()
            blocks = self._survey()
            plan = self._plan(blocks)
        self._answer(plan, final=True)

    def _settle_for_ram(self) -> None:
        """From now on only what can be answered at once counts."""
        self._use_valkey = False
        self._may_verify = False

    async def _learn(self, blocks: list[GroupBlocks], plan: Plan) -> None:
        """Whatever has to be known next, at the cost of waiting."""
        unverified = self._needed(blocks, plan, UNVERIFIED)
        if unverified:
            slots = [slot for group, number in unverified if (slot := group.slots[number]) is not None]
            await self._services.checksums.verify(slots, where="takeover")
        elif self._needed(blocks, plan, UNKNOWN):
            await self._ask(blocks, plan)
        elif not await self._fetch(blocks, plan):
            self._use_valkey = False

    # --- where the blocks lie ---------------------------------------------------------------------------------------

    def _survey(self) -> list[GroupBlocks]:
        """Look every key up anew."""
        return [self._survey_group(group) for group in self._groups]

    def _survey_group(self, group: _Group) -> GroupBlocks:
        keys = group.keys
        home = self._services.store.pool.find(self._message.domain, keys.group)
        in_ram = home.slots if home is not None else {}
        otherwise = UNKNOWN if self._use_valkey else ABSENT
        local = min(keys.local_blocks, len(keys.hashes))
        presence = bytearray([LOCAL]) * local
        slots: list[Slot | None] = [in_ram.get(block_hash) for block_hash in keys.hashes]
        for number in range(local, len(slots)):
            slot = slots[number]
            if slot is None:
                known = group.in_valkey.get(number) if self._use_valkey else None
                presence.append(otherwise if known is None else VALKEY if known else ABSENT)
            else:
                presence.append(self._presence_of(slot, group.layout.payload_bytes))
        group.slots = slots
        layout = group.layout
        return GroupBlocks(
            layout.tokens_per_block, layout.window_blocks, layout.payload_bytes, keys.local_blocks, bytes(presence)
        )

    def _presence_of(self, slot: Slot, payload_bytes: int) -> int:
        if slot.payload_bytes != payload_bytes:
            return ABSENT  # stored by an engine that misnamed its domain: of no use to this one
        if slot.state == READY:
            if slot.flags & UNVERIFIED_FLAG:
                return UNVERIFIED if self._may_verify else ABSENT
            return RAM
        return FETCHING if slot.fetching and self._use_valkey else ABSENT

    def _plan(self, blocks: list[GroupBlocks]) -> Plan:
        """The longest prefix that also stays within the engine's share of the arena."""
        plan = make_plan(blocks)
        leases = self._services.store.leases
        allowance = self._services.lease_limit_bytes - leases.leased_bytes(self._engine_id)
        wanted = sum(len(needed) * block.payload_bytes for needed, block in zip(plan.needed, blocks, strict=True))
        if wanted <= allowance:
            return plan
        limit = limit_for_bytes(blocks, self._lease_cost, max(allowance, 0))
        return plan if limit is None else make_plan(blocks, limit_tokens=limit)

    def _lease_cost(self, group_number: int, number: int) -> int:
        group = self._groups[group_number]
        slot = group.slots[number]
        if slot is not None and self._services.store.leases.is_leased_by(self._engine_id, slot):
            return 0
        return group.layout.payload_bytes

    def _needed(self, blocks: list[GroupBlocks], plan: Plan, presence: int) -> list[tuple[_Group, int]]:
        """Needed keys that lie there."""
        return [
            (group, number)
            for group, block, needed in zip(self._groups, blocks, plan.needed, strict=True)
            for number in needed
            if block.presence[number] == presence
        ]

    def _is_settled(self, blocks: list[GroupBlocks], plan: Plan) -> bool:
        """Whether everything needed is in RAM and verified."""
        ram = bytes([RAM])
        return all(
            not block.presence[needed.start : needed.stop].strip(ram)
            for block, needed in zip(blocks, plan.needed, strict=True)
        )

    # --- Valkey -----------------------------------------------------------------------------------------------------

    def _may_use_valkey(self) -> bool:
        """Whether asking Valkey makes sense: configured, not private, and a shard in use."""
        fetches = self._services.fetches
        if fetches is None or self._message.private:
            return False
        samples = [
            (group, number) for group in self._groups for number in {0, len(group.keys.hashes) - 1} if number >= 0
        ]
        return any(fetches.tier.available(self._key(group, number)) for group, number in samples)

    def _key(self, group: _Group, number: int) -> BlockKey:
        return BlockKey(self._message.domain, group.keys.group, group.keys.hashes[number])

    def _recompute_seconds(self, blocks: list[GroupBlocks], plan: Plan) -> float | None:
        """T: time to compute what only Valkey would save."""
        without = usable_boundary([block.without_valkey() for block in blocks])
        return recompute_seconds(max(plan.boundary_tokens - without, 0), self._message.tokens_per_second)

    def _is_worth_asking(self, blocks: list[GroupBlocks], plan: Plan) -> bool:
        fetches = self._services.fetches
        assert fetches is not None
        estimate = fetches.estimate.seconds_for(0, time.monotonic())
        return is_worth_fetching(estimate, self._recompute_seconds(blocks, plan))

    async def _ask(self, blocks: list[GroupBlocks], plan: Plan) -> None:
        """Learn which of the unknown keys below the boundary exist; what we saw there lately counts as existing."""
        fetches = self._services.fetches
        assert fetches is not None
        asked: list[tuple[_Group, int]] = []
        for group, block in zip(self._groups, blocks, strict=True):
            end = plan.boundary_tokens // block.tokens_per_block
            for number in range(min(end, len(block.presence))):
                if block.presence[number] != UNKNOWN:
                    continue
                if self._services.hints.has(self._message.domain, group.keys.group, group.keys.hashes[number]):
                    group.in_valkey[number] = True
                else:
                    asked.append((group, number))
        if asked:
            timeout = self._exists_timeout(blocks, plan)
            found = await fetches.tier.exists([self._key(group, number) for group, number in asked], timeout)
            for (group, number), exists in zip(asked, found, strict=True):
                group.in_valkey[number] = exists

    def _exists_timeout(self, blocks: list[GroupBlocks], plan: Plan) -> float:
        recompute = self._recompute_seconds(blocks, plan)
        if recompute is None:
            return EXISTS_TIMEOUT_SECONDS
        return min(EXISTS_TIMEOUT_SECONDS, max(EXISTS_FRACTION * recompute, EXISTS_TIMEOUT_MIN_SECONDS))

    async def _fetch(self, blocks: list[GroupBlocks], plan: Plan) -> bool:
        """Get what lies in Valkey; False when recomputing is quicker, as expected or as it turned out."""
        fetches = self._services.fetches
        assert fetches is not None
        absent = self._needed(blocks, plan, VALKEY)
        flying = self._needed(blocks, plan, FETCHING)
        total = sum(group.layout.payload_bytes for group, _number in absent + flying)
        recompute = self._recompute_seconds(blocks, plan)
        estimate = fetches.estimate.seconds_for(total, time.monotonic())
        self._note_estimates(estimate, recompute)
        if absent and not is_worth_fetching(estimate, recompute):
            self._services.metrics.fetches_declined.labels("before_fetching").inc()
            return False
        slots = [slot for group, number in absent if (slot := self._make_room(group, number)) is not None]
        joined = [slot for group, number in flying if (slot := group.slots[number]) is not None]
        return await self._wait_for(fetches, slots, joined, total, recompute)

    def _make_room(self, group: _Group, number: int) -> Slot | None:
        """A slot to fetch into; without one the key counts as absent."""
        hashes = group.keys.hashes
        parent = hashes[number - 1] if number else b""
        key = StoreKey(group.keys.group, hashes[number], parent, number)
        slot = self._services.store.begin_fetch(self._message.domain, key, group.layout.payload_bytes)
        if slot is None:
            group.in_valkey[number] = False
        return slot

    async def _wait_for(
        self, fetches: Fetches, slots: list[Slot], joined: list[Slot], total: int, recompute: float | None
    ) -> bool:
        started = time.monotonic()
        self._arrived_bytes = 0
        self._waiting = {slot.index for slot in slots + joined}
        if slots:
            fetches.begin(slots, self._heard)
        for slot in joined:
            fetches.join(slot, self._heard)
        try:
            while self._waiting:
                await self._wait_for_change(next_look_seconds(recompute))
                elapsed = time.monotonic() - started
                verdict = judge(elapsed, recompute, arrived_bytes=self._arrived_bytes, total_bytes=total)
                if self._waiting and verdict is Judgement.GIVE_UP:
                    self._services.metrics.fetches_declined.labels("in_flight").inc()
                    return False
        finally:
            fetches.leave(slots + joined, self._heard)
        return True

    async def _wait_for_change(self, timeout_seconds: float) -> None:
        """Until the last block has come, or it is time for another look."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_seconds)
        except TimeoutError:
            return

    def _heard(self, slot: Slot, is_ready: bool) -> None:
        """A block has arrived, and is leased before anything could evict it, or will not come."""
        self._waiting.discard(slot.index)
        if is_ready:
            self._arrived_bytes += slot.payload_bytes
            self._services.store.leases.extend(self._engine_id, self._message.request, slot, self._lease_until_ns())
        else:
            self._forget(slot)
        if not self._waiting:
            self._changed.set()

    def _forget(self, slot: Slot) -> None:
        for group in self._groups:
            if group.keys.group == slot.home.group and slot.position < len(group.keys.hashes):
                group.in_valkey[slot.position] = False

    def _note_estimates(self, estimate: float, recompute: float | None) -> None:
        self._services.metrics.fetch_estimate_seconds.set(estimate)
        if recompute is not None:
            self._services.metrics.recompute_estimate_seconds.set(recompute)

    # --- answering --------------------------------------------------------------------------------------------------

    def _lease_until_ns(self) -> int:
        return time.monotonic_ns() + self._services.lease_ns

    def _answer(self, plan: Plan, *, final: bool) -> None:
        """Lease what is needed and resident, and say where everything stands."""
        until_ns = self._lease_until_ns()
        verdicts: list[GroupVerdict] = []
        leased: list[Slot] = []
        for group, needed in zip(self._groups, plan.needed, strict=True):
            hits = [(number, slot) for number in needed if (slot := group.slots[number]) is not None and slot.readable]
            leased += [slot for _number, slot in hits]
            verdicts.append(self._verdict_of(group, needed, hits))
        self._services.store.leases.replace(self._engine_id, self._message.request, leased, until_ns)
        self._send(Verdict(self._message.rid, self._message.request, final, until_ns, verdicts))
        if final:
            self._count(plan)

    def _verdict_of(self, group: _Group, needed: range, hits: list[tuple[int, Slot]]) -> GroupVerdict:
        keys = group.keys
        total = len(keys.hashes)
        states = bytearray(total)
        tiers = bytearray(total)
        slots = [0] * total
        generations = [0] * total
        states[: keys.local_blocks] = bytes([wire.LOCAL]) * keys.local_blocks
        for number in needed:
            states[number] = wire.PENDING
            in_ram = group.arrival[number] in (RAM, UNVERIFIED)
            tiers[number] = wire.TIER_RAM if in_ram else wire.TIER_VALKEY
        for number, slot in hits:
            states[number] = wire.HIT
            slots[number] = slot.index
            generations[number] = slot.generation
        return GroupVerdict(keys.group, bytes(states), bytes(tiers), slots, generations)

    def _touch(self) -> None:
        """The resident blocks of the request were asked for, also those whose copy on the GPU is used."""
        pool = self._services.store.pool
        for group in self._groups:
            recency = pool.next_recency(len(group.slots))
            for number, slot in enumerate(group.slots):
                if slot is not None:
                    pool.set_recency(slot, recency - number)

    def _count(self, plan: Plan) -> None:
        metrics = self._services.metrics
        tally = {"local": 0, "ram": 0, "valkey": 0, "none": 0}
        for group, needed in zip(self._groups, plan.needed, strict=True):
            in_ram = sum(group.arrival[number] in (RAM, UNVERIFIED) for number in needed)
            tally["local"] += group.keys.local_blocks
            tally["ram"] += in_ram
            tally["valkey"] += len(needed) - in_ram
            tally["none"] += len(group.keys.hashes) - group.keys.local_blocks - len(needed)
        for tier, count in tally.items():
            if count:
                metrics.lookup_blocks.labels(tier).inc(count)
        metrics.lookups.labels("hit" if any(map(len, plan.needed)) else "miss").inc()
        metrics.lookup_seconds.observe(time.monotonic() - self._started)
