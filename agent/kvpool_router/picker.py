"""From a parsed request to a route: tokens, block hashes, what each target holds, the choice.

Invariant: choosing and charging happen in one step without an await between, so that of two requests that arrive
together the second sees the first one's work.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from kvpool_core.block_hash import block_hashes, short_hash
from kvpool_router.config import RouterConfig
from kvpool_router.endpoints import EndpointState, EndpointTable
from kvpool_router.fleet_index import EngineRef, FleetIndex
from kvpool_router.load import LoadBook
from kvpool_router.prefix_index import NO_BLOCKS, TargetMask, TierBlockCount, count_tiers, runs
from kvpool_router.reasons import LOAD, NO_TOKENS, SINGLE, STALE_INDEX, UNHASHABLE, UNKNOWN_MODEL
from kvpool_router.request_body import RenderedPrompt, RequestBody, TokenPrompt
from kvpool_router.scoring import Candidate, Choice, choose
from kvpool_router.speculative import SpeculativeBlocks
from kvpool_router.tokens import TokenSource

_HASHES_PER_TURN = 256
"""Block hashes computed before other requests get a turn: about half a millisecond."""


@dataclass(frozen=True, slots=True)
class HashSettings:
    """What a prompt's block hashes depend on besides its tokens and salt."""

    block_size: int
    seed: str
    lora: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Target:
    """One engine (of a DP rank) at an endpoint. `ref` is None while no agent reported it."""

    name: str
    endpoint: EndpointState
    dp_rank: int | None
    ref: EngineRef | None
    settings: HashSettings | None


@dataclass(slots=True)
class Plan:
    """What is known of a request before the choice. `chains`: short block hashes by how they were hashed."""

    body: RequestBody
    tokens: array[int] | None
    why_not: str
    """Reason when there are no tokens to route by; "" when there are."""
    chains: dict[HashSettings, list[int]] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """The prompt's size, estimated while its tokens are unknown."""
        return len(self.tokens) if self.tokens is not None else self.body.estimated_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and what is expected there."""

    target: Target
    reason: str
    blocks_by_target: Mapping[str, TierBlockCount]
    chain: Sequence[int]
    prompt_tokens: int
    choice: Choice

    @property
    def blocks(self) -> TierBlockCount:
        """Blocks expected at the chosen target."""
        return self.blocks_by_target[self.target.name]


class Picker:
    """Plans and chooses."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        table: EndpointTable,
        fleet: FleetIndex,
        book: LoadBook,
        tokens: TokenSource,
        speculative: SpeculativeBlocks,
    ) -> None:
        self._config = config
        self._table = table
        self._fleet = fleet
        self._book = book
        self._tokens = tokens
        self._speculative = speculative
        self._speculative_holders: dict[str, int] = {}

    # --- targets ------------------------------------------------------------------------------------------------

    def serving(self, model: str) -> tuple[list[EndpointState], bool]:
        """Endpoints that are up and serve `model` (silent ones when none is), and whether the model is known at all.

        An unknown model goes to whoever is up: an engine's own answer says it best, or it was loaded just now. A model
        that only endpoints serve which are down goes to none. An endpoint that has not said yet what it serves may serve
        any model, but not one that is silent while another is up.
        """
        every = self._table.all()
        is_any_up = any(endpoint.up for endpoint in every)
        told = [endpoint for endpoint in every if endpoint.models is not None or not (endpoint.silent and is_any_up)]
        known = [endpoint for endpoint in told if self._serves(endpoint, model)]
        if known or not every:
            return self._table.usable(known), True
        return self._table.usable(every), False

    def _serves(self, endpoint: EndpointState, model: str) -> bool:
        if not model or endpoint.models is None or model in endpoint.models:
            return True
        return any(model in ref.info.served_names for ref in self._refs(endpoint))

    def _refs(self, endpoint: EndpointState) -> list[EngineRef]:
        return self._fleet.engines_at(endpoint.address, endpoint.spec.agent)

    def _targets(self, model: str) -> list[Target]:
        return [target for endpoint in self.serving(model)[0] for target in self._targets_at(endpoint, model)]

    def _targets_at(self, endpoint: EndpointState, model: str) -> list[Target]:
        refs = self._refs(endpoint)
        if not refs:
            return [Target(endpoint.address, endpoint, None, None, None)]
        return [_target(endpoint, ref, model, names_rank=len(refs) > 1) for ref in refs]

    # --- planning -----------------------------------------------------------------------------------------------

    async def plan(self, body: RequestBody, *, authorization: str | None, by_load: bool = False) -> Plan:
        """Get the prompt's tokens and hash its blocks in every way that a target needs; neither when `by_load`."""
        if by_load:
            return Plan(body, None, LOAD)
        if not self._fleet.in_step():
            tokens = body.prompt.tokens if isinstance(body.prompt, TokenPrompt) else None
            return Plan(body, tokens, STALE_INDEX)
        plan = await self._with_tokens(body, authorization)
        if plan.tokens is not None:
            for settings in {target.settings for target in self._targets(body.model) if target.settings}:
                plan.chains[settings] = await _chain(plan.tokens, settings, body.salt)
        return plan

    async def _with_tokens(self, body: RequestBody, authorization: str | None) -> Plan:
        if body.prompt is None:
            return Plan(body, None, UNHASHABLE)
        if isinstance(body.prompt, TokenPrompt):
            return Plan(body, body.prompt.tokens, "")
        tokens = await self._ask(body.prompt, body.model, authorization)
        return Plan(body, tokens, "" if tokens is not None else NO_TOKENS)

    async def _ask(self, prompt: RenderedPrompt, model: str, authorization: str | None) -> array[int] | None:
        """The least busy endpoint is asked first."""
        endpoints = sorted(self.serving(model)[0], key=self.running_at)
        return await self._tokens.fetch(prompt, endpoints, authorization=authorization)

    def running_at(self, endpoint: EndpointState) -> int:
        """Requests in flight there: its own engines' word, or what this router has sent and they have not told yet."""
        own = sum(map(self._book.running, self._book.targets_at(endpoint.address)))
        return max(own, sum(ref.info.requests for ref in self._refs(endpoint)))

    # --- choosing -----------------------------------------------------------------------------------------------

    def choose(self, plan: Plan, *, now: float, without: Container[str] = ()) -> Route | None:
        """The route of a planned request, to none of the targets in `without`; None when there is no target."""
        model = plan.body.model
        endpoints, is_known = self.serving(model)
        every = (target for endpoint in endpoints for target in self._targets_at(endpoint, model))
        targets = {target.name: target for target in every if target.name not in without}
        if not targets:
            return None
        found = self._expected_blocks(plan, list(targets.values()), now)
        candidates = [self._candidate(target, found[target.name], now) for target in targets.values()]
        choice = choose(
            candidates,
            prompt_tokens=plan.prompt_tokens,
            affinity_key=None if plan.why_not else self._affinity_key(plan),
            weights=self._config.scoring,
        )
        target = targets[choice.score.target]
        chain = self._chain_of(plan, target)
        reason = _reason(plan, choice, is_known=is_known)
        return Route(target, reason, found, chain, plan.prompt_tokens, choice)

    def assume_held(self, route: Route, *, now: float) -> None:
        """The chosen target will have the prompt's blocks soon, unless its endpoint is gone by now."""
        endpoint = route.target.endpoint
        if route.chain and self._table.get(endpoint.address) is endpoint:
            extra = min(route.choice.score.seconds, 5 * self._config.index.speculative_seconds)
            holder = self._speculative_holder(route.target.name)
            self._speculative.add(holder, route.chain, now=now, extra_seconds=extra)

    def forget(self, endpoint: EndpointState) -> None:
        """The endpoint is gone for good."""
        names = [name for name in self._speculative_holders if name.partition("#")[0] == endpoint.address]
        for name in names:
            holder = self._speculative_holders.pop(name)
            self._speculative.forget(holder)
            self._fleet.index.retire(holder)
        for name in self._book.targets_at(endpoint.address):
            self._book.forget(name)

    def _expected_blocks(self, plan: Plan, targets: Sequence[Target], now: float) -> dict[str, TierBlockCount]:
        masks = {target.name: self._target_mask(target) for target in targets}
        found = dict.fromkeys(masks, NO_BLOCKS)
        for group in {_chain_key(target) for target in targets if target.settings in plan.chains}:
            members = [target for target in targets if _chain_key(target) == group]
            chain = self._chain_of(plan, members[0])
            interest = 0
            for target in members:
                interest |= masks[target.name].any
            held = self._speculative.overlay(self._fleet.index.masks(chain), chain, now=now)
            prefix = runs(held, interest)
            found.update({target.name: count_tiers(prefix, masks[target.name]) for target in members})
        return found

    def _target_mask(self, target: Target) -> TargetMask:
        gpu, ram, valkey = 0, 0, 0
        if target.ref is not None and target.settings is not None:
            # An adapter's blocks lie in a domain of its own that only its engine knows: look at `gpu` alone.
            gpu, ram, valkey = self._fleet.holder_masks(target.ref, shared_tiers=target.settings.lora is None)
        return TargetMask(gpu | self._speculative_holders.get(target.name, 0), ram, valkey)

    def _candidate(self, target: Target, blocks: TierBlockCount, now: float) -> Candidate:
        book, name = self._book, target.name
        told = target.ref.info if target.ref is not None else None
        return Candidate(
            target=name,
            tokens_per_second=book.tokens_per_second(name),
            queued_tokens=max(book.queued_tokens(name, now=now), told.prompt_tokens if told else 0),
            running=max(book.running(name), told.requests if told else 0),
            recent=book.recent(name, now=now),
            order=book.last_chosen(name),
            blocks=blocks,
            block_tokens=target.ref.block_tokens if target.ref is not None else 1,
        )

    def _speculative_holder(self, target: str) -> int:
        holder = self._speculative_holders.get(target)
        if holder is None:
            holder = self._speculative_holders[target] = self._fleet.index.acquire()
        return holder

    def _affinity_key(self, plan: Plan) -> bytes | None:
        """Stands for the prompt's first blocks; for a prompt shorter than a block, for its tokens."""
        if plan.tokens is None:
            return None
        chain = next(iter(plan.chains.values()), [])
        if not chain:
            return plan.tokens.tobytes()
        return chain[min(self._config.scoring.affinity_blocks, len(chain)) - 1].to_bytes(8, "big")

    @staticmethod
    def _chain_of(plan: Plan, target: Target) -> Sequence[int]:
        """The prompt's hashes at the granularity of the target's blocks."""
        if target.settings is None or target.ref is None:
            return ()
        chain = plan.chains.get(target.settings, [])
        scale = max(1, target.ref.block_tokens // target.settings.block_size)
        return chain if scale == 1 else chain[scale - 1 :: scale]


def _reason(plan: Plan, choice: Choice, *, is_known: bool) -> str:
    if choice.reason == SINGLE:
        return SINGLE
    if not is_known:
        return UNKNOWN_MODEL
    return plan.why_not or choice.reason


def _chain_key(target: Target) -> tuple[HashSettings | None, int]:
    return target.settings, target.ref.block_tokens if target.ref is not None else 1


def _target(endpoint: EndpointState, ref: EngineRef, model: str, *, names_rank: bool) -> Target:
    card = (endpoint.models or {}).get(model)
    lora = card.lora if card is not None else None
    name = f"{endpoint.address}#{ref.info.dp_rank}" if names_rank else endpoint.address
    settings = HashSettings(ref.info.block_size, ref.info.hash_seed, lora) if ref.info.block_size > 0 else None
    return Target(name, endpoint, ref.info.dp_rank if names_rank else None, ref, settings)


async def _chain(tokens: array[int], settings: HashSettings, salt: str | None) -> list[int]:
    """Short hashes of the prompt's full blocks, giving way to other requests between."""
    chain: list[int] = []
    hashes = block_hashes(
        tokens, block_size=settings.block_size, seed=settings.seed, cache_salt=salt, lora=settings.lora
    )
    for block in hashes:
        chain.append(short_hash(block))
        if len(chain) % _HASHES_PER_TURN == 0:
            await asyncio.sleep(0)
    return chain
