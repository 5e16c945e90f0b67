"""Leases that end before the engine uses them: it asks anew, but not for ever."""

from __future__ import annotations

import pytest

from kvpool_vllm.lease_wear import LeaseWear, Reliance

LEASE_SECONDS = 3.0
_NS = 1_000_000_000


def looks(*, step_seconds: float, steps: int, wear: LeaseWear, final: bool = True) -> list[Reliance]:
    """What each step finds; the agent answers at once, and the engine looks a step later."""
    asked, found = 0.0, []
    for step in range(1, steps + 1):
        now = step * step_seconds
        until_ns = int((asked + LEASE_SECONDS) * _NS)
        found.append(wear.judge(lease_until_ns=until_ns, final=final, now_ns=int(now * _NS), step=step))
        if found[-1] is Reliance.GIVE_UP:
            break
        if found[-1] is Reliance.ASK_AGAIN:
            asked = now
    return found


@pytest.mark.parametrize("step_seconds", [LEASE_SECONDS - 0.5, LEASE_SECONDS, 60.0])
def test_steps_as_long_as_a_lease_end_in_a_miss_after_one_more_question(step_seconds: float) -> None:
    assert looks(step_seconds=step_seconds, steps=20, wear=LeaseWear()) == [Reliance.ASK_AGAIN, Reliance.GIVE_UP]


def test_a_request_that_waits_long_for_room_is_asked_about_as_often_as_its_leases_end() -> None:
    found = looks(step_seconds=0.1, steps=1000, wear=LeaseWear())
    assert found.count(Reliance.ASK_AGAIN) == 1000 * 0.1 / (LEASE_SECONDS - 0.5)
    assert Reliance.GIVE_UP not in found


def test_blocks_that_stay_on_their_way_are_not_waited_for_over_more_than_two_leases() -> None:
    found = looks(step_seconds=0.1, steps=1000, wear=LeaseWear(), final=False)
    assert (found.count(Reliance.ASK_AGAIN), found[-1]) == (1, Reliance.GIVE_UP)


def test_a_verdict_that_leases_nothing_does_not_wear_out() -> None:
    wear = LeaseWear()
    assert wear.judge(lease_until_ns=None, final=True, now_ns=10**18, step=7) is Reliance.HOLDS
    assert wear.asked_again_at is None


def test_a_request_that_vllm_does_not_look_at_for_many_steps_is_asked_about_each_time_and_loads() -> None:
    """A full engine looks at its queue up to the first request without room: of those behind, each look may come late."""
    wear, asked = LeaseWear(), 0.0
    for step in range(100, 1000, 100):  # 15 s between two looks of steps of 0.15 s
        now = step * 0.15
        assert (
            wear.judge(lease_until_ns=int((asked + LEASE_SECONDS) * _NS), final=True, now_ns=int(now * _NS), step=step)
            is Reliance.ASK_AGAIN
        )
        asked = now
    soon = int((asked + 0.15) * _NS)
    until_ns = int((asked + LEASE_SECONDS) * _NS)
    assert wear.judge(lease_until_ns=until_ns, final=True, now_ns=soon, step=901) is Reliance.HOLDS
