"""The circuit breaker of a shard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool_agent.valkey_breaker import (
    Breaker,
    BreakerState,
    after_failure,
    after_success,
    begin_probe,
    is_closed,
    is_probe_due,
)

THRESHOLD = 3
OPEN_SECONDS = 2.0


def fail(breaker: Breaker, *, now: float, at_once: bool = False) -> Breaker:
    return after_failure(breaker, now=now, threshold=THRESHOLD, at_once=at_once, open_seconds=OPEN_SECONDS)


def test_opens_at_the_threshold_of_failures_in_a_row() -> None:
    breaker = fail(fail(Breaker(), now=0), now=0)
    assert is_closed(breaker)
    assert not is_closed(fail(breaker, now=0))


def test_success_starts_the_count_anew() -> None:
    breaker = after_success(fail(fail(Breaker(), now=0), now=0))
    assert is_closed(fail(fail(breaker, now=0), now=0))


def test_opens_at_once_when_told() -> None:
    assert not is_closed(fail(Breaker(), now=0, at_once=True))


def test_late_success_of_an_earlier_request_does_not_close() -> None:
    assert not is_closed(after_success(fail(Breaker(), now=0, at_once=True)))


def test_probe_is_due_after_the_open_time_and_closes_on_success() -> None:
    breaker = fail(Breaker(), now=10, at_once=True)
    assert not is_probe_due(breaker, now=11.9)
    assert is_probe_due(breaker, now=12)
    assert is_closed(after_success(begin_probe(breaker, now=12, give_up_seconds=5)))


def test_failed_probe_opens_for_another_open_time() -> None:
    breaker = fail(begin_probe(fail(Breaker(), now=0, at_once=True), now=2, give_up_seconds=5), now=3)
    assert breaker.state is BreakerState.OPEN
    assert not is_probe_due(breaker, now=4.9)
    assert is_probe_due(breaker, now=5)


def test_lost_probe_is_replaced() -> None:
    breaker = begin_probe(fail(Breaker(), now=0, at_once=True), now=2, give_up_seconds=5)
    assert not is_probe_due(breaker, now=6.9)
    assert is_probe_due(breaker, now=7)


@given(st.lists(st.booleans(), max_size=50))
def test_closed_exactly_while_fewer_than_threshold_failures_came_in_a_row(outcomes: list[bool]) -> None:
    breaker, in_a_row, was_opened = Breaker(), 0, False
    for is_success in outcomes:
        breaker = after_success(breaker) if is_success else fail(breaker, now=0)
        in_a_row = 0 if is_success else in_a_row + 1
        was_opened = was_opened or in_a_row >= THRESHOLD
        assert is_closed(breaker) == (not was_opened)


class BreakerMachine(RuleBasedStateMachine):
    """Against the words of the invariant: closed again only by a success after a probe began."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = 0.0
        self.was_closed = True
        self.probes_since_open = 0

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def succeed(self) -> None:
        self.breaker = after_success(self.breaker)

    @rule(at_once=st.booleans())
    def fail(self, at_once: bool) -> None:
        self.breaker = fail(self.breaker, now=self.now, at_once=at_once)

    @rule()
    def probe(self) -> None:
        if is_probe_due(self.breaker, now=self.now):
            self.breaker = begin_probe(self.breaker, now=self.now, give_up_seconds=1)
            self.probes_since_open += 1

    @invariant()
    def closes_only_after_a_probe(self) -> None:
        closed = is_closed(self.breaker)
        if closed and not self.was_closed:
            assert self.probes_since_open
        if not closed and self.was_closed:
            self.probes_since_open = 0
        self.was_closed = closed


TestBreakerMachine = BreakerMachine.TestCase
