"""One Prefetch from its arrival to its final verdict.

Invariant: a key is answered HIT only when its slot is READY, verified and leased to the asking request; the final verdict
has no PENDING key; once closed, nothing is leased or answered any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpool_agent.checksums import Checksums
from kvpool_agent.fetches import Fetches
from kvpool_agent.hints import ValkeyHints
from kvpool_agent.load_estimate import Judgement, is_worth_fetching, judge, next_look_seconds, recompute_seconds
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.prefetch import (
    FETCHING,
    UNKNOWN,
    UNVERIFIED,
    VALKEY,
    GroupBlocks,
    Plan,
    limit_for_bytes,
    make_plan,
    usable_boundary,
)
from kvpool_agent.request_blocks import RequestBlocks, RequestGroup, is_settled
from kvpool_agent.slot import Slot
from kvpool_agent.slot_store import SlotStore
from kvpool_core.wire import GroupLayout, Prefetch, Verdict

ROUNDS_MAX = 6
"""Existence, verification and fetching each change what is known; then the plan is made anew, this often at most."""
EXISTS_TIMEOUT_SECONDS = 0.2
EXISTS_FRACTION = 0.1
EXISTS_TIMEOUT_MIN_SECONDS = 0.02
"""Asking for existence may take a tenth of the time to recompute, between 20 and 200 ms."""


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
        self._request = RequestBlocks(services.store.pool, message, layouts)
        self._changed = asyncio.Event()
        self._waiting: set[int] = set()
        self._arrived_bytes = 0
        self._closed = False

    def close(self) -> None:
        """Nobody wants the answer any more. A cancelled task may have steps left, and blocks arrive without it."""
        self._closed = True

    # --- the first answer, at once, and the last ----------------------------------------------------------------------

    def begin(self, *, may_wait: bool) -> bool:
        """Answer what is known now; whether that was final. `may_wait` False: nothing beyond RAM is looked for."""
        self._request.use_valkey = may_wait and self._is_valkey_usable()
        self._request.may_verify = may_wait
        blocks, plan = self._survey()
        if self._request.needed(blocks, plan, UNKNOWN) and not self._is_worth_asking(blocks, plan):
            self._services.metrics.fetches_declined.labels("before_asking").inc()
            self._request.use_valkey = False
            blocks, plan = self._survey()
        is_final = is_settled(blocks, plan)
        self._answer(plan, final=is_final)
        self._request.touch()
        return is_final

    async def finish(self) -> None:
        """Find out the rest, fetch it, and send the final verdict."""
        for _round in range(ROUNDS_MAX):
            if self._closed:
                return
            blocks, plan = self._survey()
            if is_settled(blocks, plan):
                break
            await self._learn(blocks, plan)
        else:
            self._request.use_valkey = self._request.may_verify = False
            blocks, plan = self._survey()
        self._answer(plan, final=True)

    async def _learn(self, blocks: list[GroupBlocks], plan: Plan) -> None:
        """Whatever has to be known next, at the cost of waiting."""
        unverified = self._request.needed(blocks, plan, UNVERIFIED)
        if unverified:
            slots = [slot for group, number in unverified if (slot := group.slots[number]) is not None]
            await self._services.checksums.verify(slots, where="takeover")
        elif self._request.needed(blocks, plan, UNKNOWN):
            await self._ask(blocks, plan)
        elif not await self._fetch(blocks, plan):
            self._request.use_valkey = False

    # --- planning -----------------------------------------------------------------------------------------------------

    def _survey(self) -> tuple[list[GroupBlocks], Plan]:
        """Where the blocks lie, and the longest prefix that also stays within the engine's share of the arena."""
        blocks = self._request.survey()
        plan = make_plan(blocks)
        allowance = self._services.lease_limit_bytes - self._services.store.leases.leased_bytes(self._engine_id)
        wanted = sum(len(needed) * block.payload_bytes for needed, block in zip(plan.needed, blocks, strict=True))
        if wanted <= allowance:
            return blocks, plan
        limit = limit_for_bytes(blocks, self._lease_cost, max(allowance, 0))
        return blocks, plan if limit is None else make_plan(blocks, limit_tokens=limit)

    def _lease_cost(self, group_number: int, number: int) -> int:
        group = self._request.groups[group_number]
        slot = group.slots[number]
        is_leased = slot is not None and self._services.store.leases.is_leased_by(self._engine_id, slot)
        return 0 if is_leased else group.layout.payload_bytes

    def _recompute_seconds(self, blocks: list[GroupBlocks], plan: Plan) -> float | None:
        """T: time to compute what only Valkey would save."""
        without = usable_boundary([block.without_valkey() for block in blocks])
        return recompute_seconds(max(plan.boundary_tokens - without, 0), self._message.tokens_per_second)

    # --- Valkey -------------------------------------------------------------------------------------------------------

    def _is_valkey_usable(self) -> bool:
        """Whether asking Valkey makes sense: configured, not private, and a shard in use."""
        fetches = self._services.fetches
        if fetches is None or self._message.private:
            return False
        return any(map(fetches.tier.available, self._request.sample()))

    def _is_worth_asking(self, blocks: list[GroupBlocks], plan: Plan) -> bool:
        estimate = self._fetches().estimate.seconds_for(0, time.monotonic())
        return is_worth_fetching(estimate, self._recompute_seconds(blocks, plan))

    def _fetches(self) -> Fetches:
        fetches = self._services.fetches
        assert fetches is not None, "nothing is UNKNOWN or in Valkey when there is none"
        return fetches

    async def _ask(self, blocks: list[GroupBlocks], plan: Plan) -> None:
        """Learn which of the unknown keys below the boundary exist; what we saw there lately counts as existing."""
        asked: list[tuple[RequestGroup, int]] = []
        for group, number in self._request.below_boundary(blocks, plan, UNKNOWN):
            if self._services.hints.has(self._message.domain, group.keys.group, group.keys.hashes[number]):
                group.in_valkey[number] = True
            else:
                asked.append((group, number))
        if asked:
            keys = [self._request.key(group, number) for group, number in asked]
            found = await self._fetches().tier.exists(keys, self._exists_timeout(blocks, plan))
            for (group, number), exists in zip(asked, found, strict=True):
                group.in_valkey[number] = exists

    def _exists_timeout(self, blocks: list[GroupBlocks], plan: Plan) -> float:
        recompute = self._recompute_seconds(blocks, plan)
        if recompute is None:
            return EXISTS_TIMEOUT_SECONDS
        return min(EXISTS_TIMEOUT_SECONDS, max(EXISTS_FRACTION * recompute, EXISTS_TIMEOUT_MIN_SECONDS))

    async def _fetch(self, blocks: list[GroupBlocks], plan: Plan) -> bool:
        """Get what lies in Valkey; False when recomputing is quicker, as expected or as it turned out."""
        absent = self._request.needed(blocks, plan, VALKEY)
        flying = self._request.needed(blocks, plan, FETCHING)
        total = sum(group.layout.payload_bytes for group, _number in absent + flying)
        recompute = self._recompute_seconds(blocks, plan)
        estimate = self._fetches().estimate.seconds_for(total, time.monotonic())
        self._note_estimates(estimate, recompute)
        if absent and not is_worth_fetching(estimate, recompute):
            self._services.metrics.fetches_declined.labels("before_fetching").inc()
            return False
        slots = [slot for group, number in absent if (slot := self._make_room(group, number)) is not None]
        joined = [slot for group, number in flying if (slot := group.slots[number]) is not None]
        return await self._wait_for(slots, joined, total, recompute)

    def _make_room(self, group: RequestGroup, number: int) -> Slot | None:
        """A slot to fetch into; without one the key counts as absent."""
        key = group.store_key(number)
        slot = self._services.store.begin_fetch(self._message.domain, key, group.layout.payload_bytes)
        if slot is None:
            group.in_valkey[number] = False
        return slot

    async def _wait_for(self, slots: list[Slot], joined: list[Slot], total: int, recompute: float | None) -> bool:
        """Until every block has come or will not come; False when given up before."""
        fetches = self._fetches()
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
        if self._closed:
            return
        if is_ready:
            self._arrived_bytes += slot.payload_bytes
            self._services.store.leases.extend(self._engine_id, self._message.request, slot, self._lease_until_ns())
        else:
            self._request.forget(slot)
        if not self._waiting:
            self._changed.set()

    def _note_estimates(self, estimate: float, recompute: float | None) -> None:
        self._services.metrics.fetch_estimate_seconds.set(estimate)
        if recompute is not None:
            self._services.metrics.recompute_estimate_seconds.set(recompute)

    # --- answering ----------------------------------------------------------------------------------------------------

    def _lease_until_ns(self) -> int:
        return time.monotonic_ns() + self._services.lease_ns

    def _answer(self, plan: Plan, *, final: bool) -> None:
        """Lease what is needed and resident, and say where everything stands."""
        if self._closed:
            return
        until_ns = self._lease_until_ns()
        hits = self._request.hits(plan)
        leased = [slot for group in hits for _number, slot in group]
        self._services.store.leases.replace(self._engine_id, self._message.request, leased, until_ns)
        verdicts = self._request.verdicts(plan, hits)
        self._send(Verdict(self._message.rid, self._message.request, final, until_ns, verdicts))
        if final:
            self._count(plan)

    def _count(self, plan: Plan) -> None:
        metrics = self._services.metrics
        for tier, count in self._request.tally(plan).items():
            if count:
                metrics.lookup_blocks.labels(tier).inc(count)
        metrics.lookups.labels("hit" if any(map(len, plan.needed)) else "miss").inc()
        metrics.lookup_seconds.observe(time.monotonic() - self._started)
