"""The prefix index against a naive model, and what a lookup counts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvpool_router.prefix_index import SHARDS, PrefixIndex, TargetMask, TierBlockCount, count_tiers, runs

BLOCKS = st.integers(0, 40).map(lambda number: number * 64)
"""Few values and fewer shards, so that operations meet."""


class IndexMachine(RuleBasedStateMachine):
    """Holders come, go and are reused; the model is a set of blocks for each live holder."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_entries=1_000_000)
        self.model: dict[int, set[int]] = {}

    @rule(target=holders)
    def acquire(self) -> int:
        holder = self.index.acquire()
        assert holder not in self.model
        self.model[holder] = set()
        return holder

    @rule(holder=consumes(holders))
    def retire(self, holder: int) -> None:
        self.index.retire(holder)
        del self.model[holder]

    @rule(holder=holders, blocks=st.lists(BLOCKS, max_size=8))
    def add(self, holder: int, blocks: list[int]) -> None:
        self.index.add(holder, blocks)
        self.model[holder] |= set(blocks)

    @rule(first=holders, second=holders, blocks=st.lists(BLOCKS, max_size=8))
    def discard(self, first: int, second: int, blocks: list[int]) -> None:
        self.index.discard(first | second, blocks)
        for holder in (first, second):
            self.model[holder] -= set(blocks)

    @rule(times=st.sampled_from([1, SHARDS // 2, SHARDS]))
    def sweep(self, times: int) -> None:
        for _ in range(times):
            self.index.sweep()

    @invariant()
    def masks_say_what_the_model_says(self) -> None:
        live = 0
        for holder in self.model:
            live |= holder
        every = [number * 64 for number in range(41)]
        for block, mask in zip(every, self.index.masks(every), strict=True):
            held = {holder for holder, blocks in self.model.items() if block in blocks}
            assert {holder for holder in self.model if mask & live & holder} == held

    @invariant()
    def counts_say_what_the_model_says(self) -> None:
        assert {holder: self.index.count(holder) for holder in self.model} == {
            holder: len(blocks) for holder, blocks in self.model.items()
        }


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_retired_bit_is_reused_only_after_a_whole_sweep() -> None:
    index = PrefixIndex(1_000)
    first = index.acquire()
    index.add(first, range(600))
    index.retire(first)
    second = index.acquire()
    assert second != first
    for _ in range(SHARDS):
        index.sweep()
    assert not index.needs_sweep
    assert index.acquire() == first
    assert index.masks(range(600)) == [0] * 600


def test_holder_retired_during_a_sweep_waits_for_the_next() -> None:
    index = PrefixIndex(10_000)
    first, second = index.acquire(), index.acquire()
    index.add(second, range(SHARDS))
    index.retire(first)
    index.sweep()
    index.retire(second)
    for _ in range(SHARDS - 1):
        index.sweep()
    assert index.acquire() == first
    assert index.needs_sweep
    for _ in range(SHARDS):
        index.sweep()
    assert index.acquire() == second
    assert len(index) == 0


def test_full_index_drops_the_oldest_blocks() -> None:
    index = PrefixIndex(SHARDS * 32)
    holder = index.acquire()
    index.add(holder, range(SHARDS * 40))
    assert len(index) <= SHARDS * 32
    masks = index.masks(range(SHARDS * 40))
    assert masks[-SHARDS * 20 :] == [holder] * (SHARDS * 20)
    assert masks[:SHARDS] == [0] * SHARDS
    assert index.count(holder) == len(index) == SHARDS * 40 - index.evicted


def test_block_stored_again_elsewhere_counts_as_young() -> None:
    index = PrefixIndex(SHARDS * 32)
    holder, other = index.acquire(), index.acquire()
    index.add(holder, range(SHARDS * 32))
    index.add(other, range(SHARDS))
    index.add(holder, range(SHARDS * 32, SHARDS * 40))
    assert index.masks(range(SHARDS)) == [holder | other] * SHARDS


def test_retired_holder_gets_no_blocks() -> None:
    index = PrefixIndex(1_000)
    holder = index.acquire()
    index.retire(holder)
    index.add(holder, [1, 2, 3])
    assert len(index) == 0


def test_size_stays_the_same_over_churn_of_holders() -> None:
    index = PrefixIndex(100_000)
    for _ in range(20):
        holder = index.acquire()
        index.add(holder, range(2_000))
        index.retire(holder)
        for _ in range(SHARDS):
            index.sweep()
    assert len(index) == 0
    assert index.live_holders == 0
    assert index.acquire() <= 4


def _naive(masks: Sequence[int], target: TargetMask) -> TierBlockCount:
    """Block by block: GPU while it lasts, then whatever loads."""
    gpu = 0
    while gpu < len(masks) and masks[gpu] & target.gpu:
        gpu += 1
    ram = valkey = 0
    for mask in masks[gpu:]:
        if mask & target.ram:
            ram += 1
        elif mask & target.valkey:
            valkey += 1
        else:
            break
    return TierBlockCount(gpu, ram, valkey)


MASKS = st.lists(st.integers(0, 63), max_size=20)


@given(MASKS, st.integers(0, 63), st.integers(0, 63), st.integers(0, 63))
def test_lookup_counts_what_a_walk_over_the_blocks_counts(masks: list[int], gpu: int, ram: int, valkey: int) -> None:
    target = TargetMask(gpu, ram, valkey)
    assert count_tiers(runs(masks, target.any), target) == _naive(masks, target)


@given(MASKS, st.integers(0, 63), st.integers(0, 63))
def test_other_targets_interest_does_not_change_a_count(masks: list[int], mine: int, others: int) -> None:
    target = TargetMask(mine & 3, mine & 12, mine & 48)
    assert count_tiers(runs(masks, target.any | others), target) == _naive(masks, target)


def test_gpu_blocks_after_a_gap_do_not_count_as_gpu() -> None:
    target = TargetMask(gpu=1, ram=2, valkey=4)
    assert count_tiers(runs([1, 3, 2, 3, 4, 1], 7), target) == TierBlockCount(gpu=2, ram=2, valkey=1)
