"""A sliding-window hybrid with several KV-cache groups: the same equality, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.answers import Loads, reference_pair, whole_blocks
from tests.engine.conftest import Starting, fresh_prompt, settle, wait_for_valkey
from tests.harness.engine import Engine
from tests.harness.node import Node
from tests.harness.valkey_cluster import ValkeyServers, free_ports


@pytest.fixture(scope="module")
def hybrid(hybrid_starting: Starting, folder: Path) -> Iterator[tuple[Engine, Engine, Node]]:
    with ValkeyServers(folder=folder / "hybrid-valkey") as valkey:
        node = Node("node-h", folder=folder / "nh", admin_port=free_ports(1)[0], valkey={"endpoints": valkey.endpoints})
        try:
            node.start().wait_ready()
            engine, reference = hybrid_starting.wait()
            engine.wait_identified()
            yield engine, reference, node
        finally:
            hybrid_starting.kill()
            node.stop()


def test_hybrid_prompt_comes_back_from_ram_and_from_valkey(hybrid: tuple[Engine, Engine, Node]) -> None:
    engine, reference, node = hybrid
    prompt = fresh_prompt()
    expected = reference_pair(reference, prompt)
    assert engine.complete(prompt) == expected.cold
    settle(node)
    engine.reset_own_cache()
    loads = Loads(engine)
    assert engine.complete(prompt) == expected.cached
    assert loads.by_tier() == {"ram": whole_blocks(prompt), "valkey": 0}

    node.stop()  # the arena is gone with its holder: what is left is Valkey's
    node.start().wait_ready()
    wait_for_valkey(node)
    engine.wait_identified()
    engine.reset_own_cache()
    loads = Loads(engine)
    answer = engine.complete(prompt)
    assert loads.by_tier() == {"ram": 0, "valkey": whole_blocks(prompt)}
    assert answer == expected.cached


def test_engine_has_several_groups(hybrid: tuple[Engine, Engine, Node]) -> None:
    _, _, node = hybrid
    (engine,) = node.stats()["engines"]
    assert len({group["group"] for group in engine["groups"]}) > 1
    assert {group["window_blocks"] > 0 for group in engine["groups"]} == {True, False}
