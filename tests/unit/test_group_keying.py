"""How requests are named to the agent: draft models, very long prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent import checks
from kvpool_core import wire
from kvpool_core.errors import UnsupportedModelError
from kvpool_vllm.group_keying import (
    LEAD,
    GroupKeying,
    asked_tokens,
    group_keys,
    index_of,
    is_answer_to,
    leading_keys,
    registered_window_blocks,
    with_leads,
)

FULL = GroupKeying(0, 16, 1, 0)
WINDOW = GroupKeying(1, 16, 1, 3)


def hashes(count: int) -> list[bytes]:
    return [(number + 1).to_bytes(32, "big") for number in range(count)]


def keyings() -> st.SearchStrategy[list[GroupKeying]]:
    sizes = st.sampled_from([1, 2, 4])
    return st.lists(st.tuples(sizes, st.integers(0, 3), st.booleans()), min_size=1, max_size=5).map(
        lambda shapes: [
            GroupKeying(number, 16 * size, size, window, is_draft)
            for number, (size, window, is_draft) in enumerate(shapes)
        ]
    )


def test_limits_are_those_that_the_agent_holds_engines_to() -> None:
    assert checks.PREFETCH_KEYS_MAX == wire.PREFETCH_KEYS_MAX == wire.ANNOUNCED_SLOTS_MAX
    assert checks.KEYS_MAX == wire.RESERVE_KEYS_MAX


def test_groups_without_a_draft_model_are_named_as_they_are() -> None:
    assert with_leads([FULL, WINDOW]) == [FULL, WINDOW]


def test_other_groups_are_moved_back_by_the_block_that_vllm_drops_of_a_drafts_group() -> None:
    draft = GroupKeying(2, 64, 4, 0, is_draft=True)
    moved = with_leads([FULL, WINDOW, draft])
    assert [keying.lead_blocks for keying in moved] == [4, 4, 0]
    asked = group_keys(moved, hashes(8), tokens=128, local_tokens=0, windows_are_local=False)
    assert [len(keys.hashes) for keys in asked] == [12, 12, 2]
    assert asked[0].hashes[:5] == [LEAD] * 4 + hashes(1)
    assert [keys.local_blocks for keys in asked] == [4, 4, 0], "nobody is asked for what is in front"
    assert index_of(moved, asked)[moved[0].key(hashes(8)[0])] == (0, 4)
    assert index_of(moved, asked)[draft.key(hashes(8)[3])] == (2, 0)
    assert not any(key.startswith(LEAD) for key in index_of(moved, asked))


def test_window_of_a_draft_has_the_dropped_block_behind_it() -> None:
    assert registered_window_blocks(3, is_draft=True) == 4
    assert registered_window_blocks(3, is_draft=False) == 3
    assert registered_window_blocks(0, is_draft=True) == 0, "full attention needs all of the prefix anyway"


def test_blocks_larger_than_a_drafts_are_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedModelError, match="group 0 have 64 tokens, those of the draft model 16"):
        with_leads([GroupKeying(0, 64, 4, 0), GroupKeying(1, 16, 1, 0, is_draft=True)])


def test_engine_vouches_for_its_windows_only_when_vllm_has_said_what_it_holds() -> None:
    for vouched, local in ((True, [2, 2]), (False, [2, 0])):
        asked = group_keys([FULL, WINDOW], hashes(9), tokens=144, local_tokens=40, windows_are_local=vouched)
        assert [keys.local_blocks for keys in asked] == local


@given(groups=keyings(), blocks=st.integers(0, 400), limit=st.integers(60, 2000))
def test_no_prompt_is_too_long_for_a_prefetch(groups: list[GroupKeying], blocks: int, limit: int) -> None:
    try:
        moved = with_leads(groups)
    except UnsupportedModelError:
        return
    tokens = min(asked_tokens(moved, limit), blocks * 16)
    asked = group_keys(moved, hashes(blocks), tokens=tokens, local_tokens=blocks * 16, windows_are_local=True)
    assert sum(len(keys.hashes) for keys in asked) <= limit
    assert all(keys.local_blocks == len(keys.hashes) for keys in asked)
    for keying, keys in zip(moved, asked, strict=True):
        behind_leads = keys.hashes[keying.lead_blocks :]
        assert (
            behind_leads == hashes(blocks)[keying.hashes_per_block - 1 :: keying.hashes_per_block][: len(behind_leads)]
        )


def test_prefetch_and_its_verdict_fit_a_frame_at_the_longest() -> None:
    moved = with_leads([GroupKeying(number, 16, 1, 0) for number in range(3)])
    tokens = asked_tokens(moved)
    assert tokens >= 1_000_000, "a million tokens in three groups are asked for whole"
    asked = group_keys(moved, hashes(tokens // 16 + 9), tokens=tokens, local_tokens=0, windows_are_local=False)
    message = wire.Prefetch(1, "1", bytes(16), False, asked, 1.0)
    checks.check_prefetch(message, {number: wire.GroupLayout(number, 1, 16, 0) for number in range(3)})
    wire.encode(message)
    count = len(asked[0].hashes)
    slots, generations = [(1 << 32) - 1] * count, [(1 << 64) - 1] * count
    verdicts = [wire.GroupVerdict(number, bytes(count), bytes(count), slots, generations) for number in range(3)]
    wire.encode(wire.Verdict(1, "1", True, 1 << 62, verdicts))


def test_verdict_counts_only_when_it_speaks_of_every_key() -> None:
    whole = wire.GroupVerdict(0, bytes(2), bytes(2), [0, 0], [0, 0])
    assert is_answer_to([whole, whole], [2, 2])
    assert not is_answer_to([whole], [2, 2])
    assert not is_answer_to([], [2])
    assert not is_answer_to([whole], [3])
    assert not is_answer_to([wire.GroupVerdict(0, bytes(2), bytes(2), [0], [0, 0])], [2])
    assert not is_answer_to([wire.GroupVerdict(0, bytes(2), bytes(1), [0, 0], [0, 0])], [2])


def test_store_of_too_many_blocks_keeps_the_shortest_prefix_of_all_groups() -> None:
    positions = {bytes([group, block]): block for group in range(2) for block in range(5)}
    kept = leading_keys(list(positions), positions.__getitem__, 7)
    assert kept == [bytes([group, block]) for group in range(2) for block in range(3)]
    assert leading_keys(list(positions), positions.__getitem__, 10) == list(positions)
