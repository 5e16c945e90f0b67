"""Prefetch plans against brute force, and the load-or-recompute rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.load_estimate import (
    HALF_LIFE_SECONDS,
    FetchEstimate,
    Judgement,
    is_worth_fetching,
    judge,
    recompute_seconds,
)
from kvpool_agent.prefetch import ABSENT, LOCAL, RAM, UNKNOWN, VALKEY, GroupBlocks, limit_for_bytes, make_plan


@st.composite
def _group(draw: st.DrawFn) -> GroupBlocks:
    blocks = draw(st.integers(0, 12))
    local = draw(st.integers(0, blocks))
    rest = draw(st.lists(st.sampled_from([ABSENT, RAM, RAM, VALKEY]), min_size=blocks - local, max_size=blocks - local))
    return GroupBlocks(
        tokens_per_block=draw(st.sampled_from([1, 2, 3])),
        window_blocks=draw(st.sampled_from([0, 0, 1, 2, 5])),
        payload_bytes=draw(st.sampled_from([1, 10])),
        local_blocks=local,
        presence=bytes([LOCAL] * local + rest),
    )


_groups = st.lists(_group(), min_size=1, max_size=3)


def _serves(group: GroupBlocks, boundary: int) -> bool:
    end, rest = divmod(boundary, group.tokens_per_block)
    if rest or end > len(group.presence):
        return False
    start = max(0, end - group.window_blocks) if group.window_blocks else 0
    return ABSENT not in group.presence[start:end]


@given(_groups)
def test_boundary_is_the_largest_that_every_group_can_serve(groups: list[GroupBlocks]) -> None:
    top = max(len(group.presence) * group.tokens_per_block for group in groups)
    best = max(boundary for boundary in range(top + 1) if all(_serves(group, boundary) for group in groups))
    assert make_plan(groups).boundary_tokens == best


@given(_groups, st.integers(0, 40))
def test_limited_plan_is_the_best_below_the_limit_and_needs_only_what_exists(
    groups: list[GroupBlocks], limit: int
) -> None:
    plan = make_plan(groups, limit_tokens=limit)
    assert plan.boundary_tokens <= limit
    assert all(_serves(group, plan.boundary_tokens) for group in groups)
    for group, needed in zip(groups, plan.needed, strict=True):
        assert all(group.presence[number] not in (ABSENT, LOCAL) for number in needed)
        end = plan.boundary_tokens // group.tokens_per_block
        start = max(0, end - group.window_blocks) if group.window_blocks else 0
        assert set(range(start, end)) - set(needed) <= set(range(group.local_blocks))


@given(_groups, st.integers(0, 60))
def test_plan_below_the_byte_limit_costs_at_most_the_allowance(groups: list[GroupBlocks], allowance: int) -> None:
    limit = limit_for_bytes(groups, lambda group, _number: groups[group].payload_bytes, allowance)
    plan = make_plan(groups, limit_tokens=limit)
    cost = sum(len(needed) * group.payload_bytes for group, needed in zip(groups, plan.needed, strict=True))
    assert cost <= allowance


def test_windowed_group_needs_only_its_last_window() -> None:
    window = GroupBlocks(16, 2, 1, 0, bytes([RAM] * 10))
    full = GroupBlocks(16, 0, 1, 4, bytes([LOCAL] * 4 + [RAM] * 4 + [ABSENT] * 2))
    plan = make_plan([full, window])
    assert plan.boundary_tokens == 8 * 16
    assert plan.needed == (range(4, 8), range(6, 8))


def test_hole_in_a_window_moves_the_boundary_before_it() -> None:
    window = GroupBlocks(16, 3, 1, 0, bytes([RAM, RAM, RAM, RAM, ABSENT, RAM, RAM]))
    assert make_plan([window]).boundary_tokens == 4 * 16


def test_without_valkey_the_rest_is_absent() -> None:
    group = GroupBlocks(16, 0, 1, 1, bytes([LOCAL, RAM, VALKEY, UNKNOWN]))
    assert make_plan([group]).boundary_tokens == 64
    assert make_plan([group.without_valkey()]).boundary_tokens == 32


def test_fetch_is_not_begun_when_recomputing_is_quicker() -> None:
    assert is_worth_fetching(0.79, 1.0)
    assert not is_worth_fetching(0.81, 1.0)
    assert is_worth_fetching(1e9, recompute_seconds(1000, 0.0))


def test_fetch_in_flight_is_judged_by_what_has_arrived() -> None:
    assert judge(0.04, 1.0, arrived_bytes=1, total_bytes=1000) is Judgement.WAIT  # too early to say
    assert judge(0.05, 1.0, arrived_bytes=100, total_bytes=1000) is Judgement.WAIT  # 0.5 s in all
    assert judge(0.05, 1.0, arrived_bytes=50, total_bytes=1000) is Judgement.GIVE_UP  # 1.0 s in all
    assert judge(0.09, 1.0, arrived_bytes=0, total_bytes=1000) is Judgement.WAIT
    assert judge(0.10, 1.0, arrived_bytes=0, total_bytes=1000) is Judgement.GIVE_UP
    assert judge(0.81, 1.0, arrived_bytes=999, total_bytes=1000) is Judgement.GIVE_UP
    assert judge(60.0, None, arrived_bytes=0, total_bytes=1000) is Judgement.WAIT


def test_short_fetches_get_at_least_five_milliseconds() -> None:
    assert judge(0.0049, 0.05, arrived_bytes=1, total_bytes=100) is Judgement.WAIT
    assert judge(0.0051, 0.05, arrived_bytes=1, total_bytes=100) is Judgement.GIVE_UP


@given(st.floats(0.001, 100), st.integers(1, 1 << 40))
def test_pessimistic_estimate_fades(latency: float, size: int) -> None:
    slow = FetchEstimate().with_sample(latency_seconds=latency, size_bytes=size, seconds=latency * 100, now_seconds=0)
    later = 20 * HALF_LIFE_SECONDS
    fresh = FetchEstimate().seconds_for(1 << 20, 0)
    assert abs(slow.seconds_for(1 << 20, later) - fresh) < fresh * 0.05


def test_estimate_follows_what_is_measured() -> None:
    estimate = FetchEstimate()
    for _ in range(60):
        estimate = estimate.with_sample(latency_seconds=0.01, size_bytes=10_000_000, seconds=0.11, now_seconds=0)
    assert abs(estimate.seconds_for(50_000_000, 0) - 0.51) < 0.01
