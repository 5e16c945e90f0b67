"""Speculative entries come at once and go by themselves."""

from __future__ import annotations

from kvpool_router.speculative import SpeculativeBlocks


def overlay(blocks: SpeculativeBlocks, chain: list[int], now: float) -> list[int]:
    return blocks.overlay([0] * len(chain), chain, now=now)


def test_entry_counts_for_its_life_and_little_longer() -> None:
    blocks = SpeculativeBlocks(2.0)
    blocks.add(1, [5, 6, 7], now=10.0)
    assert overlay(blocks, [5, 6, 8], 10.0) == [1, 1, 0]
    assert overlay(blocks, [5], 12.0) == [1]
    assert overlay(blocks, [5], 12.51) == [0]
    assert len(blocks) == 0


def test_longer_prefill_makes_for_a_longer_life() -> None:
    blocks = SpeculativeBlocks(2.0)
    blocks.add(1, [5], now=0.0, extra_seconds=6.0)
    assert overlay(blocks, [5], 8.0) == [1]
    assert overlay(blocks, [5], 8.6) == [0]


def test_holders_of_several_buckets_add_up() -> None:
    blocks = SpeculativeBlocks(2.0)
    blocks.add(1, [5, 6], now=0.0)
    blocks.add(2, [5, 7], now=1.0)
    assert blocks.overlay([4, 0], [5, 6], now=1.0) == [7, 1]
    assert overlay(blocks, [5, 7], 3.0) == [2, 2]


def test_forgotten_holder_is_nowhere() -> None:
    blocks = SpeculativeBlocks(2.0)
    blocks.add(1, [5, 6], now=0.0)
    blocks.add(2, [5], now=1.0)
    blocks.forget(1)
    assert overlay(blocks, [5, 6], 1.0) == [2, 0]
    assert len(blocks) == 1


def test_buckets_are_bounded() -> None:
    blocks = SpeculativeBlocks(2.0)
    for number in range(10):
        blocks.add(1, range(number * 100_000, (number + 1) * 100_000), now=0.0)
    assert len(blocks) <= 262_144
