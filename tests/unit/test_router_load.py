"""Work in flight and measured rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_router.load import Charge, LoadBook


def start(book: LoadBook, tokens: int = 3_000, *, now: float = 0.0, cold: bool = True, **more: object) -> Charge:
    streaming = bool(more.get("streaming", True))
    prefill = more.get("prefill_seconds")
    seconds = prefill if isinstance(prefill, float) else None
    return book.start("a", left_tokens=tokens, cold=cold, streaming=streaming, now=now, prefill_seconds=seconds)


def test_prompt_tokens_are_charged_until_the_first_byte() -> None:
    book = LoadBook(30.0)
    charge = start(book)
    assert (book.queued_tokens("a", now=1.0), book.running("a")) == (3_000, 1)
    book.first_byte(charge, now=2.0)
    assert (book.queued_tokens("a", now=2.0), book.running("a")) == (0, 1)
    book.end(charge)
    assert book.running("a") == 0


def test_failed_request_takes_its_whole_charge_back_once() -> None:
    book = LoadBook(30.0)
    charge = start(book)
    book.end(charge)
    book.end(charge)
    book.first_byte(charge, now=1.0)
    assert (book.queued_tokens("a", now=1.0), book.running("a")) == (0, 0)


def test_answer_that_comes_whole_is_charged_for_twice_its_expected_prefill() -> None:
    book = LoadBook(30.0)
    start(book, streaming=False, prefill_seconds=2.0)
    assert book.queued_tokens("a", now=3.9) == 3_000
    assert book.queued_tokens("a", now=4.0) == 0
    assert book.running("a") == 1


def test_rate_is_measured_by_cold_streamed_prompts_alone_on_their_engine() -> None:
    book = LoadBook(30.0)
    for options in ({"cold": False}, {"streaming": False}, {"tokens": 100}):
        charge = start(book, **options)
        book.first_byte(charge, now=1.0)
        book.end(charge)
    assert book.tokens_per_second("a") == 0
    first, second = start(book), start(book)
    book.first_byte(second, now=1.0)
    assert book.tokens_per_second("a") == 0
    book.first_byte(first, now=2.0)
    assert book.tokens_per_second("a") == pytest.approx(1_500)


def test_one_odd_measurement_does_not_move_the_rate() -> None:
    book = LoadBook(30.0)
    for seconds in (2.0, 2.0, 0.001, 2.0, 2.0):
        charge = start(book)
        book.first_byte(charge, now=seconds)
        book.end(charge)
    assert book.tokens_per_second("a") == pytest.approx(1_500)


def test_recent_requests_fade() -> None:
    book = LoadBook(30.0)
    for _ in range(8):
        book.end(start(book, now=0.0))
    assert book.recent("a", now=0.0) == pytest.approx(8)
    assert book.recent("a", now=30.0) == pytest.approx(4)
    assert book.recent("b", now=30.0) == 0


def test_forgotten_target_with_requests_in_flight_stays_until_they_end() -> None:
    book = LoadBook(30.0)
    charge = start(book)
    book.forget("a")
    assert book.running("a") == 1
    book.end(charge)
    assert book.targets() == []


def test_forgotten_target_that_comes_back_before_its_requests_ended_is_kept() -> None:
    book = LoadBook(30.0)
    before = start(book)
    book.forget("a")
    after = start(book)
    book.end(before)
    assert book.running("a") == 1
    book.end(after)
    assert book.targets() == ["a"]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["first", "end", "tick"])), max_size=40), st.booleans())
def test_every_charge_is_taken_back(steps: list[tuple[int, str]], streaming: bool) -> None:
    book = LoadBook(30.0)
    charges = [start(book, 100 + number, streaming=streaming, prefill_seconds=1.0) for number in range(6)]
    for now, (number, step) in enumerate(steps):
        if step == "first":
            book.first_byte(charges[number], now=float(now))
        elif step == "end":
            book.end(charges[number])
        assert 0 <= book.queued_tokens("a", now=float(now)) <= sum(charge.tokens for charge in charges)
    for charge in charges:
        book.end(charge)
    assert (book.queued_tokens("a", now=1e9), book.running("a")) == (0, 0)
