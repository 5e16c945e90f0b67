"""An engine whose domain does not come says so: when, once, and what is missing."""

from __future__ import annotations

from kvpool_vllm.domain_wait import AGREED_SECONDS, WEIGHTS_SECONDS, DomainWait


def connected(*, registered: bool = True) -> DomainWait:
    """Since second 0."""
    wait = DomainWait()
    wait.begin(0.0)
    if registered:
        wait.registered(0.0)
    return wait


def test_nothing_is_overdue_without_an_agent() -> None:
    wait = DomainWait()
    wait.registered(0.0)
    assert not wait.is_overdue(1e9)
    wait.begin(1e9)
    wait.end()
    assert wait.complaint(2e9) == ""


def test_weights_that_are_being_read_are_given_their_time_and_then_named() -> None:
    wait = connected(registered=False)
    wait.told("pending", "0 of 1 workers registered", 1.0)
    assert wait.complaint(WEIGHTS_SECONDS - 1) == ""
    assert "weights are still being read" in wait.complaint(WEIGHTS_SECONDS)


def test_time_for_the_other_ranks_begins_with_the_registration() -> None:
    wait = connected(registered=False)
    wait.registered(WEIGHTS_SECONDS - 1)
    assert not wait.is_overdue(WEIGHTS_SECONDS + AGREED_SECONDS - 2)
    assert wait.is_overdue(WEIGHTS_SECONDS + AGREED_SECONDS)


def test_missing_rank_is_named_in_the_agents_words_once() -> None:
    wait = connected()
    wait.told("pending", "1 of 2 workers registered", 1.0)
    assert "'1 of 2 workers registered'" in wait.complaint(AGREED_SECONDS)
    assert wait.complaint(AGREED_SECONDS) == ""
    assert wait.is_overdue(AGREED_SECONDS), "the metric stays"


def test_silent_agent_is_named() -> None:
    assert "the agent has not answered" in connected().complaint(AGREED_SECONDS)


def test_known_and_refused_domains_are_not_overdue() -> None:
    for state in ("known", "refused"):
        wait = connected()
        wait.told(state, "", 1.0)
        assert not wait.is_overdue(1e9)


def test_rank_that_is_lost_later_has_its_time_too() -> None:
    wait = connected()
    wait.told("known", "", 1.0)
    wait.told("pending", "0 of 1 workers registered", 1000.0)
    assert not wait.is_overdue(1000.0 + AGREED_SECONDS - 1)
    assert wait.complaint(1000.0 + AGREED_SECONDS)


def test_each_connection_begins_anew() -> None:
    wait = connected()
    assert wait.complaint(AGREED_SECONDS)
    wait.end()
    wait.begin(500.0)
    wait.registered(500.0)
    assert not wait.is_overdue(500.0 + AGREED_SECONDS - 1)
    assert wait.complaint(500.0 + AGREED_SECONDS)
