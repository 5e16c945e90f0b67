"""A load that finds another block than it was promised: recomputed, counted, and the next one works again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.answers import Loads, reference_pair, whole_blocks
from tests.engine.conftest import fresh_prompt, wait_for
from tests.harness.engine import Engine
from tests.harness.scripted_agent import ScriptedAgent


@pytest.fixture(scope="module")
def peer(folder: Path) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(folder / "scripted" / "agent.sock")
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def engine(peer: ScriptedAgent, make_engine: Callable[..., Engine], folder: Path) -> Iterator[Engine]:
    made = make_engine("scripted-engine", "tiny-llama", socket=folder / "scripted" / "agent.sock")
    try:
        yield made.start().wait_ready().wait_identified()
    finally:
        made.program.kill()


def test_outdated_generation_is_recomputed_counted_and_loads_again(
    engine: Engine, peer: ScriptedAgent, reference: Engine
) -> None:
    prompt = fresh_prompt()
    expected = reference_pair(reference, prompt)
    assert engine.complete(prompt) == expected.cold
    wait_for(lambda: peer.stored_blocks >= whole_blocks(prompt) // 32, seconds=10, what="blocks stored")

    peer.script.lie_about_generation = True
    engine.reset_own_cache()
    loads = Loads(engine)
    assert engine.complete(prompt) == expected.cold
    assert loads.by_tier()["ram"] == 0
    assert engine.metric("kvpool_connector_load_failures_total") == 1

    peer.script.lie_about_generation = False
    engine.reset_own_cache()
    assert engine.complete(prompt) == expected.cached
    assert loads.by_tier()["ram"] == whole_blocks(prompt)
    assert engine.program.is_running()
