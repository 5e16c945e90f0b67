"""The engine's prefill rate, from its steps as vLLM hands them out."""

from __future__ import annotations

import pytest

from kvpool_vllm.prefill_rate import MIN_STEP_TOKENS, STEPS_IN_FLIGHT_MAX, PrefillRate


def test_steps_one_after_another_are_measured_by_their_own_time() -> None:
    rate = PrefillRate()
    rate.step_began(1000, 10.0)
    rate.step_ended(12.0)
    assert rate.tokens_per_second == 500.0


def test_prompt_of_one_step_is_measured_with_the_next_step_handed_out_already() -> None:
    """Asynchronous scheduling: the decoding step begins before the prompt's ends."""
    rate = PrefillRate()
    rate.step_began(1000, 10.0)
    rate.step_began(1, 10.1)
    rate.step_ended(12.0)
    rate.step_ended(12.1)
    assert rate.tokens_per_second == 500.0


def test_step_that_waited_for_the_one_before_counts_from_its_end() -> None:
    rate = PrefillRate()
    for number in range(5):
        rate.step_began(1000, 10.0 + 2 * max(0, number - 1))
        if number:
            rate.step_ended(10.0 + 2 * number)
    assert rate.tokens_per_second == pytest.approx(500.0)


def test_decoding_tells_nothing() -> None:
    rate = PrefillRate()
    rate.step_began(MIN_STEP_TOKENS - 1, 0.0)
    rate.step_ended(1.0)
    assert rate.tokens_per_second == 0.0


def test_newer_steps_weigh_in_gradually() -> None:
    rate = PrefillRate()
    for began, seconds in ((0.0, 1.0), (1.0, 2.0)):
        rate.step_began(1000, began)
        rate.step_ended(began + seconds)
    assert 500.0 < rate.tokens_per_second < 1000.0


def test_fixed_rate_stays() -> None:
    rate = PrefillRate(100.0)
    rate.step_began(1000, 0.0)
    rate.step_ended(1.0)
    assert rate.tokens_per_second == 100.0


def test_steps_that_never_end_are_not_kept() -> None:
    rate = PrefillRate()
    for number in range(10 * STEPS_IN_FLIGHT_MAX):
        rate.step_began(1000, float(number))
    for number in range(10 * STEPS_IN_FLIGHT_MAX):
        rate.step_ended(1000.0 + number)
    rate.step_began(1000, 5000.0)
    rate.step_ended(5001.0)
    assert rate.tokens_per_second > 0
