"""A node's agent pod is replaced, holder and all, while its engine maps the former arena and is about to load from it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvpool_core import wire
from tests.engine.answers import Loads, reference_pair, whole_blocks
from tests.engine.conftest import fresh_prompt, settle, wait_for
from tests.harness.engine import Engine
from tests.harness.engine_client import Answer
from tests.harness.node import Node
from tests.harness.processes import Program
from tests.harness.stack import Stack

READY_SECONDS = 60.0


def arenas_mapped(program: Program) -> list[int]:
    """How many arenas each process of the program's session maps."""
    counts = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
            if session == program.pid:
                counts.append((process / "maps").read_text().count("kvpool-payload"))
        except OSError:  # it has ended
            continue
    return counts


def replace_pod(node: Node) -> None:
    """Agent and holder go at once, and with the holder the arena; others come."""
    node.agent.kill()
    node.holder.kill()
    node.holder.start()
    node.agent.start()


def test_engine_moves_to_the_arena_of_a_new_pod(fleet: Stack, reference: Engine) -> None:
    engine, node = fleet.engines[0], fleet.nodes[0]
    prompt, other = fresh_prompt(), fresh_prompt()
    expected, also_expected = reference_pair(reference, prompt), reference_pair(reference, other)
    assert engine.complete(prompt) == expected.cold
    settle(node)
    former = node.stats()["arena"]["arena_id"]
    assert max(arenas_mapped(engine.program)) == 1

    replaced = threading.Event()

    def replace_once(message: wire.Message) -> None:
        """Just before the engine learns of its hits: what it then loads lies in an arena that nobody serves any more."""
        if isinstance(message, wire.Verdict) and not replaced.is_set():
            replaced.set()
            replace_pod(node)

    engine.reset_own_cache()
    fleet.taps[0].on_message = replace_once
    try:
        answers: list[Answer] = [engine.complete(prompt)]
    finally:
        fleet.taps[0].on_message = None
    assert replaced.is_set()
    end = time.monotonic() + READY_SECONDS
    while not _serves_anew(node, engine, former):  # it answers all the time
        assert time.monotonic() < end, f"the new pod does not serve: {node.agent.tail()}"
        engine.reset_own_cache()
        answers.append(engine.complete(prompt, max_tokens=8))
    assert answers[0] in (expected.cold, expected.cached)
    assert all(answer.tokens == expected.cold.tokens[:8] for answer in answers[1:])
    assert engine.program.is_running()
    assert max(arenas_mapped(engine.program)) == 1, "the former arena is unmapped"

    engine.wait_identified()
    engine.reset_own_cache()
    assert engine.complete(other) == also_expected.cold
    settle(node)
    engine.reset_own_cache()
    loads = Loads(engine)
    assert engine.complete(other) == also_expected.cached
    assert loads.by_tier() == {"ram": whole_blocks(other), "valkey": 0}


def test_agent_that_does_not_come_back_costs_nothing_but_its_cache(fleet: Stack, reference: Engine) -> None:
    engine, node, prompt = fleet.engines[0], fleet.nodes[0], fresh_prompt()
    expected = reference_pair(reference, prompt)
    node.agent.kill()
    node.holder.kill()
    assert engine.complete(prompt) == expected.cold
    node.holder.start()
    node.agent.start()
    wait_for(lambda: _serves(node, engine), seconds=READY_SECONDS, what="the agent serves its engine again")
    engine.wait_identified()


def _serves(node: Node, engine: Engine) -> bool:
    engines = node.stats()["engines"]
    return any(e["endpoint"] == engine.endpoint and e["state"] == "known" for e in engines)


def _serves_anew(node: Node, engine: Engine, former: str) -> bool:
    try:
        return node.stats()["arena"].get("arena_id") not in (None, former) and _serves(node, engine)
    except OSError:
        return False
