"""Tensor parallelism: blocks stored by two ranks, loaded by two or by one; agents that stop at the worst moment.

tiny-llama has one layer, so its KV is bit for bit the same at any TP size (no sum over ranks comes before it).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpool_core import wire
from tests.engine.answers import Loads, Pair, reference_pair, whole_blocks
from tests.engine.conftest import LEASE_SECONDS, Starting, fresh_prompt, settle, wait_for, wait_for_valkey
from tests.harness.engine import Engine
from tests.harness.node import Node
from tests.harness.socket_tap import SocketTap
from tests.harness.stack import Stack


@dataclass(frozen=True, slots=True)
class Ranks:
    """Engines by tensor parallel size, with and without the connector, and their node behind a tap."""

    node: Node
    tap: SocketTap
    engines: dict[int, Engine]
    references: dict[int, Engine]


@pytest.fixture(scope="module")
def two_ranks(started: tuple[Stack, Engine], two_ranks_starting: Starting) -> Iterator[tuple[Engine, ...]]:
    """Engines of two ranks, beside node a and without the connector."""
    try:
        engine, reference = two_ranks_starting.wait()
        engine.wait_identified()
        yield engine, reference
    finally:
        two_ranks_starting.kill()


@pytest.fixture
def ranks(fleet: Stack, reference: Engine, two_ranks: tuple[Engine, ...]) -> Ranks:
    """Engine a of the fleet has one rank."""
    engine, reference_of_two = two_ranks
    engine.reset_own_cache()
    engines = {1: fleet.engines[0], 2: engine}
    return Ranks(fleet.nodes[0], fleet.taps[0], engines, {1: reference, 2: reference_of_two})


@pytest.mark.parametrize(("storing", "loading"), [(2, 2), (2, 1), (1, 2)])
def test_blocks_of_one_layout_load_in_the_other_with_equal_answers(ranks: Ranks, storing: int, loading: int) -> None:
    prompt = fresh_prompt()
    expected = reference_pair(ranks.references[loading], prompt)
    for engine in ranks.engines.values():
        engine.reset_own_cache()
    loading_engine = ranks.engines[loading]
    wait_for(lambda: is_asking(ranks, loading_engine), seconds=15, what="the engine asks its agent, not in a pause")
    ranks.engines[storing].complete(prompt)
    settle(ranks.node)
    ranks.engines[storing].reset_own_cache()
    loads = Loads(ranks.engines[loading])
    assert ranks.engines[loading].complete(prompt) == expected.cached
    assert loads.by_tier()["ram"] == whole_blocks(prompt), evidence(ranks)


def test_blocks_of_two_ranks_come_back_after_a_restart_and_from_valkey(ranks: Ranks) -> None:
    engine, node, prompt = ranks.engines[2], ranks.node, fresh_prompt()
    expected = reference_pair(ranks.references[2], prompt)
    wait_for(lambda: is_asking(ranks, engine), seconds=15, what="the engine asks its agent, not in a pause")
    assert engine.complete(prompt) == expected.cold
    settle(node)

    node.agent.kill()
    node.agent.start()
    assert_loads_again(ranks, prompt, expected, tier="ram")

    node.stop()  # the arena is gone with its holder: what is left is Valkey's
    node.start()
    assert_loads_again(ranks, prompt, expected, tier="valkey")


def assert_loads_again(ranks: Ranks, prompt: str, expected: Pair, *, tier: str) -> None:
    """The agent comes back; then the engine of two ranks loads a whole prompt from that tier."""
    engine = ranks.engines[2]
    ranks.node.wait_ready()
    wait_for_valkey(ranks.node)
    for one in ranks.engines.values():
        one.wait_identified()
    engine.reset_own_cache()
    loads = Loads(engine)
    assert engine.complete(prompt) == expected.cached
    assert loads.by_tier() == {"ram": 0, "valkey": 0, tier: whole_blocks(prompt)}, evidence(ranks)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("message", [wire.Reserve, wire.Reserved])
def test_agent_stopped_while_a_store_is_reserved(ranks: Ranks, size: int, message: type[wire.Message]) -> None:
    engine, prompt = ranks.engines[size], fresh_prompt()
    expected = reference_pair(ranks.references[size], prompt)
    engine.reset_own_cache()
    with stopped_at(ranks, message) as moment:
        assert engine.complete(prompt) == expected.cold
        assert moment.came, evidence(ranks)
        assert engine.complete(fresh_prompt(), max_tokens=4).tokens
    assert_nothing_is_left(ranks)
    assert engine.complete(prompt) == expected.cached


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("message", [wire.Prefetch, wire.Verdict])
def test_agent_stopped_while_a_load_is_leased(ranks: Ranks, size: int, message: type[wire.Message]) -> None:
    engine, prompt = ranks.engines[size], fresh_prompt()
    expected = reference_pair(ranks.references[size], prompt)
    engine.reset_own_cache()
    wait_for(lambda: is_asking(ranks, engine), seconds=15, what="the engine asks its agent again after a pause")
    engine.complete(prompt)
    settle(ranks.node)
    engine.reset_own_cache()
    with stopped_at(ranks, message) as moment:
        answer = engine.complete(prompt)
        assert moment.came, evidence(ranks)
    # after a Verdict the blocks are leased and loaded from the arena, without one they are computed
    assert answer == (expected.cached if message is wire.Verdict else expected.cold)
    assert_nothing_is_left(ranks)


def is_asking(ranks: Ranks, engine: Engine) -> bool:
    """Whether a new prompt's blocks are looked up; after several verdicts that did not come an engine pauses."""
    seen: list[wire.Message] = []
    ranks.tap.on_message = seen.append
    engine.complete(fresh_prompt(), max_tokens=1)
    ranks.tap.on_message = None
    return any(isinstance(message, wire.Prefetch) for message in seen)


def evidence(ranks: Ranks) -> str:
    """What engines and agent counted, for the report of a failure."""
    lines = [
        f"TP {size}: {line}"
        for size, engine in ranks.engines.items()
        for line in engine.metrics().splitlines()
        if line.startswith("kvpool_")
    ]
    return "\n".join([*lines, f"agent: {ranks.node.stats()}" if not is_stopped(ranks.node.agent.pid) else ""])


class stopped_at:  # noqa: N801 reads as a statement
    """SIGSTOP the agent when the first message of a kind passes; SIGCONT at the end."""

    def __init__(self, ranks: Ranks, kind: type[wire.Message]) -> None:
        self._ranks = ranks
        self._kind = kind
        self.came = False

    def __enter__(self) -> stopped_at:
        self._ranks.tap.on_message = self._stop
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.tap.on_message = None
        self._ranks.node.agent.signal(signal.SIGCONT)

    def _stop(self, message: wire.Message) -> None:
        if isinstance(message, self._kind) and not self.came:
            self.came = True
            self._ranks.node.agent.signal(signal.SIGSTOP)
            wait_for(lambda: is_stopped(self._ranks.node.agent.pid), seconds=5, what="the agent stopped")


def is_stopped(pid: int) -> bool:
    """Whether the kernel shows the process as stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def assert_nothing_is_left(ranks: Ranks) -> None:
    """1 s after SIGCONT, or at the leases' end, no slot is in writing and no lease is held."""
    time.sleep(1.0)
    wait_for(lambda: is_idle(ranks.node), seconds=LEASE_SECONDS, what="slots and leases are free")
    assert ranks.node.agent.is_running()
    for engine in ranks.engines.values():
        engine.wait_identified()


def is_idle(node: Node) -> bool:
    arena = node.stats()["arena"]
    return not (arena["slots"].get("writing", 0) or arena["slots"].get("quarantined", 0) or arena["leases"])
