"""A load that finds another block than it was promised: recomputed, counted, and the next one works again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.answers import Loads, reference_pair, whole_blocks
from tests.engine.conftest import fresh_prompt, wait_for
from tests.harness.engine import Engine
from tests.harness.scripted_agent import ScriptedAgent
from tests.harness.stack import Stack


@pytest.fixture
def peer(fleet: Stack, folder: Path) -> Iterator[ScriptedAgent]:
    """Engine a talks to the scripted agent for a while."""
    agent = ScriptedAgent(folder / "scripted" / "agent.sock")
    fleet.taps[0].lead_to(folder / "scripted" / "agent.sock")
    yield agent
    fleet.taps[0].lead_to(fleet.nodes[0].socket)
    agent.close()
    wait_for(lambda: fleet.nodes[0].stats()["engines"] != [], seconds=10, what="engine a back at its agent")
    fleet.engines[0].wait_identified()


def test_outdated_generation_is_recomputed_counted_and_loads_again(
    fleet: Stack, peer: ScriptedAgent, reference: Engine
) -> None:
    engine, prompt = fleet.engines[0], fresh_prompt()
    wait_for(lambda: peer.is_known, seconds=10, what="engine a known to the scripted agent")
    engine.wait_identified()
    failures = engine.metric("kvpool_connector_load_failures_total")
    expected = reference_pair(reference, prompt)
    assert engine.complete(prompt) == expected.cold
    wait_for(lambda: peer.stored_blocks >= whole_blocks(prompt) // 32, seconds=10, what="blocks stored")

    peer.script.lie_about_generation = True
    engine.reset_own_cache()
    loads = Loads(engine)
    assert engine.complete(prompt) == expected.cold
    assert loads.by_tier()["ram"] == 0
    assert engine.metric("kvpool_connector_load_failures_total") == failures + 1

    peer.script.lie_about_generation = False
    engine.reset_own_cache()
    assert engine.complete(prompt) == expected.cached
    assert loads.by_tier()["ram"] == whole_blocks(prompt)
    assert engine.program.is_running()
