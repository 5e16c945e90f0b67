"""Leases that end before the engine uses them: it asks anew, but not for ever."""

from __future__ import annotations

import pytest

from kvpool_vllm.lease_wear import ASKED_AGAIN_MAX, LeaseWear, Reliance

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
    assert not wear.asked_again


def test_a_request_that_vllm_does_not_look_at_for_many_steps_is_asked_about_some_times_and_loads() -> None:
    """A full engine looks at its queue up to the first request without room: of those behind, each look may come late."""
    wear, asked = LeaseWear(), 0.0
    late = [100 * number for number in range(1, ASKED_AGAIN_MAX + 2)]  # 15 s between two looks of steps of 0.15 s

    def judge(step: int) -> Reliance:
        until_ns = int((asked + LEASE_SECONDS) * _NS)
        return wear.judge(lease_until_ns=until_ns, final=True, now_ns=int(step * 0.15 * _NS), step=step)

    for step in late[:-1]:
        assert judge(step) is Reliance.ASK_AGAIN
        asked = step * 0.15
    assert judge(late[-2] + 1) is Reliance.HOLDS
    assert judge(late[-1]) is Reliance.ASK_AGAIN, "it held in between"


def test_a_request_that_loses_its_seat_each_time_it_is_asked_about_is_computed() -> None:
    wear = LeaseWear()
    found = [wear.judge(lease_until_ns=0, final=True, now_ns=10**18, step=1000 * number) for number in range(1, 6)]
    assert found[:ASKED_AGAIN_MAX] == [Reliance.ASK_AGAIN] * ASKED_AGAIN_MAX
    assert set(found[ASKED_AGAIN_MAX:]) == {Reliance.GIVE_UP}
