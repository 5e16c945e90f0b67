"""Which outdated agent goes next."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator import names, reasons
from kvpool_operator.observed import Node, Pod
from kvpool_operator.rollout import STOPPED_AFTER_SECONDS, Fleet, Turn, next_step

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def agent(number: int, *, new: bool = False, ready: bool = True, **parts: Any) -> Pod:
    """An agent's pod on node `number`."""
    return Pod(
        namespace="n",
        name=f"agent-{number}",
        uid=str(number),
        node=f"node-{number}",
        is_ready=ready,
        labels={names.COMPONENT_LABEL: names.AGENT},
        annotations={names.CONFIG_HASH: "new" if new else "old"},
        **parts,
    )


def fleet(*agents: Pod, desired: int | None = None, away: tuple[str, ...] = (), age: float = 10.0) -> Fleet:
    """Agents and their nodes."""
    return Fleet(
        agents=agents,
        desired=len(agents) if desired is None else desired,
        wanted_hash="new",
        nodes={pod.node: Node(name=pod.node, is_ready=pod.node not in away) for pod in agents},
        age_seconds={pod.uid: age for pod in agents},
    )


def test_nothing_outdated_nothing_to_do() -> None:
    step = next_step(fleet(agent(1, new=True), agent(2, new=True, ready=False)), may_roll=True)

    assert (step.victim, step.rollout.reason) == (None, "")


def test_one_at_a_time() -> None:
    assert next_step(fleet(agent(1), agent(2)), may_roll=True).victim == agent(1)
    going = agent(1, is_terminating=True)
    assert next_step(fleet(going, agent(2)), may_roll=True).victim is None
    assert next_step(fleet(agent(2), desired=2), may_roll=True).victim is None
    assert next_step(fleet(agent(1, new=True, ready=False), agent(2)), may_roll=True).victim is None
    assert next_step(fleet(agent(1, new=True), agent(2)), may_roll=True).victim == agent(2)


def test_broken_outdated_agents_go_first_and_need_no_turn() -> None:
    step = next_step(fleet(agent(1), agent(2, ready=False)), may_roll=False)

    assert step.victim == agent(2, ready=False)


def test_rollout_whose_new_agent_fails_stops_and_says_so() -> None:
    agents = (agent(1, new=True, ready=False), agent(2))

    step = next_step(fleet(*agents, age=STOPPED_AFTER_SECONDS + 1), may_roll=True)

    assert (step.victim, step.rollout.reason) == (None, reasons.ROLLOUT_STOPPED)


def test_node_that_is_away_holds_nothing_up() -> None:
    agents = (agent(1, new=True, ready=False), agent(2), agent(3))

    assert next_step(fleet(*agents, away=("node-1",)), may_roll=True).victim == agent(2)
    assert next_step(fleet(agent(1), away=("node-1",)), may_roll=True).victim is None


def test_pools_take_turns() -> None:
    turn = Turn()

    assert turn.take("a", NOW)
    assert not turn.take("b", NOW)
    assert turn.take("a", NOW)
    turn.give_back("b")
    assert not turn.take("b", NOW)
    turn.give_back("a")
    assert turn.take("b", NOW)
    assert next_step(fleet(agent(1)), may_roll=False).rollout.reason == reasons.WAITING_FOR_OTHER_POOL


def test_turn_of_a_pool_that_asks_no_more_goes_on() -> None:
    turn = Turn()
    limit = timedelta(seconds=STOPPED_AFTER_SECONDS)
    assert turn.take("a", NOW)
    assert turn.take("a", NOW + limit)

    assert not turn.take("b", NOW + 2 * limit)
    assert turn.take("b", NOW + 2 * limit + timedelta(seconds=1))


def test_pool_keeps_the_turn_exactly_while_an_agent_is_on_its_way() -> None:
    assert next_step(fleet(agent(1), agent(2)), may_roll=True).needs_turn
    assert next_step(fleet(agent(1, new=True, ready=False), agent(2)), may_roll=True).needs_turn
    assert next_step(fleet(agent(1), desired=2), may_roll=True).needs_turn
    assert not next_step(fleet(agent(1, new=True), agent(2), away=("node-2",)), may_roll=True).needs_turn
    assert not next_step(fleet(agent(1, new=True)), may_roll=True).needs_turn
    assert next_step(fleet(agent(1, is_terminating=True)), may_roll=True).needs_turn, (
        "the last one's successor is to come"
    )
    assert next_step(fleet(agent(1, new=True, ready=False)), may_roll=True).needs_turn
    going = fleet(agent(1, new=True), agent(2, is_terminating=True), desired=1)
    assert not next_step(going, may_roll=True).needs_turn, (
        "nobody comes after an agent of a node that is selected no more"
    )


@pytest.mark.parametrize("agents", [(agent(1),), (agent(1), agent(2, is_terminating=True))])
def test_rollout_whose_next_agent_cannot_be_made_stops_and_says_so(agents: tuple[Pod, ...]) -> None:
    short = fleet(*agents, desired=2)
    assert short.is_short
    waiting = next_step(replace(short, short_seconds=STOPPED_AFTER_SECONDS), may_roll=True)
    assert (waiting.victim, waiting.rollout.reason) == (None, reasons.ROLLING_OUT)

    step = next_step(replace(short, short_seconds=STOPPED_AFTER_SECONDS + 1), may_roll=True)

    assert (step.victim, step.rollout.reason, step.needs_turn) == (None, reasons.ROLLOUT_STOPPED, False)


def test_agent_that_ends_on_a_node_that_is_away_leaves_the_fleet_complete() -> None:
    assert not fleet(agent(1, is_terminating=True), agent(2), away=("node-1",)).is_short


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_serving_agent_is_never_taken_while_another_that_should_serve_does_not(
    states: list[tuple[bool, bool, bool]],
) -> None:
    agents = [
        agent(number, new=new, ready=ready, is_terminating=going) for number, (new, ready, going) in enumerate(states)
    ]
    all_agents = fleet(*agents)

    victim = next_step(all_agents, may_roll=True).victim

    if victim is not None and all_agents.is_serving(victim):
        assert all(all_agents.is_serving(pod) for pod in agents)
