"""The scheduler side: vLLM's OffloadingManager over verdicts of the node's agent.

Invariant: no method waits. What the agent has not said in time is a miss; what a request no longer needs is released.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool_core import wire
from kvpool_core.block_hash import HASH_BYTES
from kvpool_vllm import metrics
from kvpool_vllm.gpu_blocks import GpuBlocks
from kvpool_vllm.group_keying import GroupKeying, asked_tokens, group_keys, index_of, leading_keys
from kvpool_vllm.identification import Identification
from kvpool_vllm.lease_wear import LeaseWear, Reliance
from kvpool_vllm.lookups import Lookup, Patience, patience_for
from kvpool_vllm.prefill_rate import PrefillRate
from kvpool_vllm.scheduler_link import SchedulerLink
from kvpool_vllm.settings import Settings
from kvpool_vllm.tracked_requests import DROP_EVERY_STEPS, TrackedRequests
from kvpool_vllm.transfer_specs import LoadSpec, StoreSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvpool")


class KvpoolManager(OffloadingManager):
    """vLLM's view of the tiers behind the GPU."""

    def __init__(self, settings: Settings, identification: Identification, gpu_blocks: GpuBlocks) -> None:
        self._settings = settings
        self._identification = identification
        self._gpu_blocks = gpu_blocks
        self._groups: dict[int, GroupKeying] = {}
        self._asked_tokens = 0
        self._tracked: TrackedRequests[Lookup] = TrackedRequests()
        self._patience = Patience(settings.verdicts_missed_before_pause, settings.pause_seconds)
        self._stats = metrics.Stats()
        self._gauges: dict[str, float] = {}
        self._steps = 0
        self.rate = PrefillRate(settings.prefill_tokens_per_second)
        self.link: SchedulerLink | None = None

    def use(self, link: SchedulerLink, groups: Sequence[GroupKeying]) -> None:
        """The connection and the groups exist now."""
        self.link = link
        self._groups = {group.group: group for group in groups}
        self._asked_tokens = asked_tokens(groups)

    # --- called by the connector ----------------------------------------------------------------------------------

    def track(self, request: Request) -> None:
        """A request entered the queue: ask for its blocks at once."""
        self._tracked.begin(request)
        self.ensure_asked(request)

    @property
    def has_requests(self) -> bool:
        """Whether a request is in the engine, so that a step may come at any moment."""
        return len(self._tracked) > 0

    def ensure_asked(self, request: Request, local_tokens: int | None = None) -> None:
        """Before vLLM looks a request up: make sure that a question is open or answered, with leases that still hold.

        local_tokens: what the engine's own cache holds of the request now, None on its arrival.
        """
        former = self._tracked.lookup(request.request_id)
        if former is not None:
            if not self._is_worn_out(former, local_tokens):
                return
            self._forget(former)
        if not self._tracked.has_failed(request.request_id) and not request.skip_reading_prefix_cache:
            self._ask(request, local_tokens, former.wear if former is not None else LeaseWear())

    def _is_worn_out(self, lookup: Lookup, local_tokens: int | None) -> bool:
        """Whether its leases end, or it left out blocks that the engine's own cache has lost since; may give it up."""
        lookup.begin_attempt()
        if lookup.is_overdue(time.monotonic()) or self._is_orphaned(lookup):
            self._give_up(lookup)
        if lookup.loading:
            return False
        if local_tokens is not None and local_tokens < lookup.local_tokens:
            return True
        reliance = lookup.reliance(time.monotonic_ns(), self._steps)
        if reliance is Reliance.GIVE_UP:
            self._stats.increase_counter(metrics.WORN_OUT_VERDICTS)
            self._give_up(lookup)
        return reliance is Reliance.ASK_AGAIN

    def mark_failed(self, request_ids: Collection[str]) -> None:
        """Loads of these requests failed: they are recomputed and see only misses."""
        for request_id in request_ids:
            self._tracked.fail(request_id)
            self._stats.increase_counter(metrics.LOAD_FAILURES)
            if (lookup := self._tracked.lookup(request_id)) is not None:
                self._forget(lookup)

    def admit(self, request_ids: Collection[str]) -> None:
        """Requests that run now: those without a load need their leases no more."""
        for request_id in request_ids:
            lookup = self._tracked.lookup(request_id)
            if lookup is not None and not lookup.loading:
                self._forget(lookup)

    def on_verdict(self, verdict: wire.Verdict) -> None:
        """On the client's thread: hand a verdict to its lookup."""
        lookup = self._tracked.asked(verdict.rid)
        if lookup is not None:
            lookup.accept(verdict)

    def held(self) -> list[tuple[str, int, int]]:
        """(request, slot, generation) of every leased slot that a request may still read."""
        return [(lookup.name, *slot) for lookup in self._tracked.lookups() for slot in lookup.held()]

    def report(self) -> metrics.Stats | None:
        """Counters since the last call and the state of the connection."""
        link = self.link
        gauges = {
            metrics.CONNECTED: float(link is not None and link.client.connected),
            metrics.IDENTIFIED: float(link is not None and bool(link.domain)),
            metrics.PRIVATE: float(self._identification.is_private),
            metrics.DOMAIN_OVERDUE: float(link is not None and link.domain_wait.is_overdue(time.monotonic())),
            metrics.PREFILL_RATE: self.rate.tokens_per_second,
        }
        for name, value in gauges.items():
            if self._gauges.get(name) != value:  # vLLM logs whatever it is given every ten seconds
                self._stats.set_gauge(name, value)
        self._gauges = gauges
        stats, self._stats = self._stats, metrics.Stats()
        return stats

    # --- OffloadingManager ----------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Nothing here: the connector calls `track` with the request itself, which has the hashes."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """The key's state by what is known now."""
        lookup = self._tracked.lookup(req_context.req_id)
        return lookup.state(key) if lookup is not None else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """vLLM's own accounting: `ram` is the host, `valkey` is elsewhere."""
        lookup = self._tracked.lookup(req_context.req_id)
        if lookup is None or key not in lookup.index or not lookup.answered:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST if lookup.tier(key) == "ram" else CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Name the leased slots to the workers; the lease is released when the load ends."""
        lookup = self._tracked.lookup(req_context.req_id)
        assert lookup is not None, "vLLM loads only what a lookup found"
        lookup.loading = True
        return LoadSpec([lookup.placement(key) for key in keys], lookup.lease_until_ns)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Every worker has ended the load, well or not."""
        lookup = self._tracked.lookup(req_context.req_id)
        if lookup is None:
            return
        self._count_loaded(lookup, keys)
        self._forget(lookup)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Name the blocks; the workers reserve slots. Nothing to store where the blocks' domain is not known."""
        nothing = PrepareStoreOutput([], StoreSpec(b"", False, []), [])
        request = self._tracked.get(req_context.req_id)
        place = self._domain_of(request) if request is not None else None
        if request is None or place is None or not _is_storable(request):
            return nothing
        wanted = [OffloadKey(key) for key in leading_keys(list(keys), partial(_end_token, req_context))]
        store_keys = [self._store_key(key, request, req_context) for key in wanted]
        self._stats.increase_counter(metrics.OFFERED_BLOCKS, len(wanted))
        return PrepareStoreOutput(wanted, StoreSpec(*place, store_keys), [])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Called once a step."""
        self._steps += 1
        self.admit(list(context.new_req_ids))
        if self._steps % DROP_EVERY_STEPS == 0:
            for request_id in self._tracked.drop_finished():
                self._end(request_id)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """The request is over; a load still in flight keeps its lease until `complete_load`."""
        self._end(req_context.req_id)

    def _end(self, request_id: str) -> None:
        lookup = self._tracked.end(request_id)
        if lookup is not None:
            self._forget(lookup)

    def reset_cache(self) -> None:
        """vLLM resets connectors when weights may have changed: share nothing from now on, load nothing from before."""
        self._identification.make_private()
        logger.warning("kvpool: the external cache was reset: this engine's blocks stay private until it is restarted")
        for lookup in self._tracked.lookups():
            self._forget(lookup)

    def clear(self) -> None:
        """Nothing is asked any more: keep nothing of the requests."""
        self._tracked = TrackedRequests()

    def shutdown(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.client.close()

    # --- asking ---------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, local_tokens: int | None, wear: LeaseWear) -> None:
        if self.link is None or self._patience.is_paused(time.monotonic()):
            return
        session = self.link.session
        place = self._domain_of(request)
        if place is None:
            return
        keyings = list(self._groups.values())
        asked = self._tokens_to_ask_for(request)
        held = self._guess_local_tokens(request) if local_tokens is None else local_tokens
        missing = asked - held
        if missing <= 0:
            return
        groups = group_keys(
            keyings, request.block_hashes, tokens=asked, local_tokens=held, windows_are_local=local_tokens is not None
        )
        lookup = self._new_lookup(request.request_id, keyings, groups, missing_tokens=missing, wear=wear)
        lookup.local_tokens, lookup.session = held, session
        self._tracked.ask(lookup)
        message = wire.Prefetch(lookup.rid, lookup.name, *place, groups, self.rate.tokens_per_second)
        if session == self.link.session and self.link.client.send(message):  # a new agent knows no domain yet
            self._stats.increase_counter(metrics.QUERIED_TOKENS, missing)
        else:
            self._forget(lookup)

    def _tokens_to_ask_for(self, request: Request) -> int:
        """Those in whole blocks, as far as one Prefetch goes."""
        blocks = ((len(request.block_hashes) // k.hashes_per_block, k.tokens_per_block) for k in self._groups.values())
        return min(self._asked_tokens, max(count * tokens for count, tokens in blocks))

    def _guess_local_tokens(self, request: Request) -> int:
        """What vLLM will find in the engine's own cache, as far as groups of full attention tell."""
        full = [keying for keying in self._groups.values() if not keying.window_blocks]
        return min((self._leading_tokens(keying, request) for keying in full), default=0)

    def _leading_tokens(self, keying: GroupKeying, request: Request) -> int:
        hashes = keying.hashes(request.block_hashes, self._asked_tokens)
        return self._gpu_blocks.leading_blocks(map(keying.key, hashes)) * keying.tokens_per_block

    def _new_lookup(
        self,
        request_id: str,
        keyings: Sequence[GroupKeying],
        groups: Sequence[wire.GroupKeys],
        *,
        missing_tokens: int,
        wear: LeaseWear,
    ) -> Lookup:
        assert self.link is not None
        now = time.monotonic()
        rate = self.rate.tokens_per_second
        verdict_seconds, pending_seconds = patience_for(missing_tokens / rate if rate else None, self._settings)
        return Lookup(
            self.link.client.next_id(),
            request_id,
            now + verdict_seconds,
            now + pending_seconds,
            index_of(keyings, groups),
            [len(keys.hashes) for keys in groups],
            self.link.arena_id,
            wear,
        )

    def _is_orphaned(self, lookup: Lookup) -> bool:
        """Whether the rest of an answer was lost with the connection."""
        return (
            not lookup.final and not lookup.given_up and self.link is not None and lookup.session != self.link.session
        )

    def _give_up(self, lookup: Lookup) -> None:
        if not lookup.answered:
            self._stats.increase_counter(metrics.MISSED_VERDICTS)
            if self._patience.missed(time.monotonic()):
                self._stats.increase_counter(metrics.PAUSES)
                logger.warning(
                    "kvpool: the agent does not answer; leaving it alone for %g s", self._settings.pause_seconds
                )
        lookup.give_up()
        self._release(lookup)

    # --- book-keeping ----------------------------------------------------------------------------------------------------

    def _forget(self, lookup: Lookup) -> None:
        if lookup.answered:
            self._patience.answered()
        self._tracked.close(lookup)
        if not lookup.given_up:
            self._release(lookup)

    def _release(self, lookup: Lookup) -> None:
        self._tracked.close_question(lookup)
        if self.link is not None:
            self.link.client.send(wire.Release(self.link.client.next_id(), [lookup.name]))

    def _count_loaded(self, lookup: Lookup, keys: Collection[OffloadKey]) -> None:
        self._stats.increase_counter(metrics.LOADS)
        full = next((g for g in self._groups.values() if not g.window_blocks), None)
        for key in keys:
            if full is not None and key[HASH_BYTES:] == full.group.to_bytes(4, "big") and key in lookup.index:
                tier = lookup.tier(key) if lookup.answered else "none"
                self._stats.increase_counter(metrics.LOADED_TOKENS, full.tokens_per_block, (tier,))

    def _domain_of(self, request: Request) -> tuple[bytes, bool] | None:
        domain = self.link.domain if self.link is not None else b""
        return self._identification.domain_of(domain, request) if domain else None

    def _store_key(self, key: OffloadKey, request: Request, context: ReqContext) -> wire.StoreKey:
        block_hash, group = bytes(key[:HASH_BYTES]), int.from_bytes(key[HASH_BYTES:], "big")
        keying = self._groups[group]
        position = max(0, _end_token(context, key) // keying.tokens_per_block - 1)
        before = position * keying.hashes_per_block - 1
        parent = bytes(request.block_hashes[before]) if 0 <= before < len(request.block_hashes) else b""
        return wire.StoreKey(group, block_hash, parent, position)


def _end_token(context: ReqContext, key: bytes) -> int:
    return context.get_offload_key_position(OffloadKey(key)) or 0


def _is_storable(request: Request) -> bool:
    """A client may give identifiers that replace the content hashes of its images, and they cannot be told from real ones:
    blocks of multimodal requests are stored only when salted, so that nobody is served what another client named."""
    return bool(request.cache_salt) or not request.mm_features
