"""The blocks of one Prefetch: where they lie, which are needed, and how that is told to the engine.

Invariant: `survey` looks everything up anew, and what `verdicts` calls HIT was readable in the survey before it; nothing
may be awaited between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvpool_agent.prefetch import ABSENT, FETCHING, LOCAL, RAM, UNKNOWN, UNVERIFIED, VALKEY, GroupBlocks, Plan
from kvpool_agent.slot import Slot
from kvpool_agent.slot_pool import SlotPool
from kvpool_agent.valkey_tier import BlockKey
from kvpool_core import wire
from kvpool_core.slot_table import READY
from kvpool_core.slot_table import UNVERIFIED as UNVERIFIED_FLAG
from kvpool_core.wire import GroupKeys, GroupLayout, GroupVerdict, Prefetch, StoreKey


@dataclass(slots=True)
class RequestGroup:
    """A group of the request. `in_valkey`: what was learnt, by block number; `arrival`: where the blocks lay at first."""

    keys: GroupKeys
    layout: GroupLayout
    in_valkey: dict[int, bool] = field(default_factory=dict)
    slots: list[Slot | None] = field(default_factory=list)
    arrival: bytes = b""

    def was_in_ram(self, number: int) -> bool:
        """Whether the block lay in the arena when the Prefetch arrived."""
        return self.arrival[number] in (RAM, UNVERIFIED)

    def store_key(self, number: int) -> StoreKey:
        """The block as a store would name it."""
        hashes = self.keys.hashes
        return StoreKey(self.keys.group, hashes[number], hashes[number - 1] if number else b"", number)


class RequestBlocks:
    """All groups of one Prefetch. `use_valkey`, `may_verify`: whether blocks that take waiting count as present."""

    def __init__(self, pool: SlotPool, message: Prefetch, layouts: Mapping[int, GroupLayout]) -> None:
        self._pool = pool
        self._domain = message.domain
        self.groups = [RequestGroup(keys, layouts[keys.group]) for keys in message.groups]
        self.use_valkey = False
        self.may_verify = True

    def survey(self) -> list[GroupBlocks]:
        """Where each group's blocks lie now."""
        blocks = [self._survey_group(group) for group in self.groups]
        for group, found in zip(self.groups, blocks, strict=True):
            group.arrival = group.arrival or found.presence
        return blocks

    def _survey_group(self, group: RequestGroup) -> GroupBlocks:
        keys, layout = group.keys, group.layout
        home = self._pool.find(self._domain, keys.group)
        in_ram = home.slots if home is not None else {}
        presence = bytearray([LOCAL]) * keys.local_blocks
        group.slots = [in_ram.get(block_hash) for block_hash in keys.hashes]
        for number in range(keys.local_blocks, len(group.slots)):
            slot = group.slots[number]
            known = group.in_valkey.get(number)
            presence.append(self._presence_outside(known) if slot is None else self._presence_of(slot, layout))
        return GroupBlocks(
            layout.tokens_per_block, layout.window_blocks, layout.payload_bytes, keys.local_blocks, bytes(presence)
        )

    def _presence_outside(self, known: bool | None) -> int:
        if not self.use_valkey or known is False:
            return ABSENT
        return VALKEY if known else UNKNOWN

    def _presence_of(self, slot: Slot, layout: GroupLayout) -> int:
        if slot.payload_bytes != layout.payload_bytes:
            return ABSENT  # stored by an engine that misnamed its domain: of no use to this one
        if slot.state != READY:
            return FETCHING if slot.fetching and self.use_valkey else ABSENT
        if not slot.flags & UNVERIFIED_FLAG:
            return RAM
        return UNVERIFIED if self.may_verify else ABSENT

    def needed(self, blocks: list[GroupBlocks], plan: Plan, presence: int) -> list[tuple[RequestGroup, int]]:
        """(group, block number) of the needed blocks that lie there."""
        return [
            (group, number)
            for group, block, needed in zip(self.groups, blocks, plan.needed, strict=True)
            for number in needed
            if block.presence[number] == presence
        ]

    def below_boundary(
        self, blocks: list[GroupBlocks], plan: Plan, presence: int
    ) -> Iterator[tuple[RequestGroup, int]]:
        """(group, block number) of all blocks before the boundary that lie there, needed or not."""
        for group, block in zip(self.groups, blocks, strict=True):
            end = min(plan.boundary_tokens // block.tokens_per_block, len(block.presence))
            yield from ((group, number) for number in range(end) if block.presence[number] == presence)

    def key(self, group: RequestGroup, number: int) -> BlockKey:
        """The block as the Valkey tier names it."""
        return BlockKey(self._domain, group.keys.group, group.keys.hashes[number])

    def sample(self) -> Iterator[BlockKey]:
        """The first and last block of each group."""
        for group in self.groups:
            if group.keys.hashes:
                yield self.key(group, 0)
                yield self.key(group, -1)

    def forget(self, slot: Slot) -> None:
        """The block of this slot did not come from Valkey."""
        for group in self.groups:
            if group.keys.group == slot.home.group and slot.position < len(group.keys.hashes):
                group.in_valkey[slot.position] = False

    def touch(self) -> None:
        """The resident blocks were asked for, also those whose copy on the GPU is used."""
        for group in self.groups:
            recency = self._pool.next_recency(len(group.slots))
            for number, slot in enumerate(group.slots):
                if slot is not None:
                    self._pool.set_recency(slot, recency - number)

    def hits(self, plan: Plan) -> list[list[tuple[int, Slot]]]:
        """Per group (block number, slot) of what is needed and readable."""
        return [
            [(number, slot) for number in needed if (slot := group.slots[number]) is not None and slot.readable]
            for group, needed in zip(self.groups, plan.needed, strict=True)
        ]

    def verdicts(self, plan: Plan, hits: list[list[tuple[int, Slot]]]) -> list[GroupVerdict]:
        """What the engine is told, group by group."""
        return [
            _verdict(group, needed, found) for group, needed, found in zip(self.groups, plan.needed, hits, strict=True)
        ]

    def tally(self, plan: Plan) -> dict[str, int]:
        """Blocks asked for by the tier they lay in at arrival."""
        counts = {"local": 0, "ram": 0, "valkey": 0, "none": 0}
        for group, needed in zip(self.groups, plan.needed, strict=True):
            in_ram = sum(map(group.was_in_ram, needed))
            counts["local"] += group.keys.local_blocks
            counts["ram"] += in_ram
            counts["valkey"] += len(needed) - in_ram
            counts["none"] += len(group.keys.hashes) - group.keys.local_blocks - len(needed)
        return counts


def is_settled(blocks: list[GroupBlocks], plan: Plan) -> bool:
    """Whether everything needed is in RAM and verified."""
    ram = bytes([RAM])
    return all(
        not block.presence[needed.start : needed.stop].strip(ram)
        for block, needed in zip(blocks, plan.needed, strict=True)
    )


def _verdict(group: RequestGroup, needed: range, hits: list[tuple[int, Slot]]) -> GroupVerdict:
    keys = group.keys
    total = len(keys.hashes)
    states = bytearray(total)
    tiers = bytearray(total)
    slots = [0] * total
    generations = [0] * total
    states[: keys.local_blocks] = bytes([wire.LOCAL]) * keys.local_blocks
    for number in needed:
        states[number] = wire.PENDING
        tiers[number] = wire.TIER_RAM if group.was_in_ram(number) else wire.TIER_VALKEY
    for number, slot in hits:
        states[number] = wire.HIT
        slots[number] = slot.index
        generations[number] = slot.generation
    return GroupVerdict(keys.group, bytes(states), bytes(tiers), slots, generations)
