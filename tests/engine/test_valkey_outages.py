"""Valkey unreachable, hanging, full, with another password: nobody waits for it, answers are equal, and it is said once.

That nobody waits is told by counts: every lookup is answered in time, and what is known to be down is not asked.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import pytest
import redis

from tests.engine.answers import Loads, Pair, reference_pair, whole_blocks
from tests.engine.conftest import fresh_prompt, settle, wait_for
from tests.harness.engine import Engine
from tests.harness.engine_client import metric_sum
from tests.harness.node import Node
from tests.harness.stack import Stack

RECOVERY_SECONDS = 30.0
QUIET_SECONDS = 2.0
"""Longer than an exchange with Valkey may last."""


@contextlib.contextmanager
def unreachable(fleet: Stack) -> Iterator[None]:
    for shard in range(3):
        fleet.valkey.kill(shard)
    try:
        yield
    finally:
        for shard in range(3):
            fleet.valkey.restart(shard)


@contextlib.contextmanager
def hanging(fleet: Stack) -> Iterator[None]:
    for shard in range(3):
        fleet.valkey.pause(shard)
    try:
        yield
    finally:
        for shard in range(3):
            fleet.valkey.resume(shard)


def clients(fleet: Stack) -> list[redis.Redis]:
    return [redis.Redis(host="127.0.0.1", port=port) for port in fleet.valkey.ports]


@contextlib.contextmanager
def full(fleet: Stack) -> Iterator[None]:
    servers = clients(fleet)
    for server in servers:
        server.config_set("maxmemory-policy", "noeviction")
        server.config_set("maxmemory", "1mb")
    try:
        yield
    finally:
        for server in servers:
            server.config_set("maxmemory", "256mb")
            server.config_set("maxmemory-policy", "allkeys-lru")


@contextlib.contextmanager
def another_password(fleet: Stack) -> Iterator[None]:
    servers = clients(fleet)
    for server in servers:
        server.config_set("requirepass", "changed")
        server.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    try:
        yield
    finally:
        for server in servers:
            server.config_set("requirepass", "")


Outage = Callable[[Stack], AbstractContextManager[None]]
BAD_STATES = {"breaker": "open", "writes": "refused"}
NOBODY_WAITED = (
    "kvpool_connector_missed_verdicts_total",
    "kvpool_connector_pauses_total",
    "kvpool_connector_load_failures_total",
)


@pytest.mark.parametrize(
    ("outage", "state"),
    [(unreachable, "unreachable"), (hanging, "unreachable"), (another_password, "unauthenticated")],
)
def test_nobody_waits_for_a_lost_valkey_and_its_state_is_said_once(
    fleet: Stack, reference: Engine, outage: Outage, state: str
) -> None:
    (a, b), node = fleet.engines, fleet.nodes[0]
    settle(node)
    held = [fresh_prompt() for _ in range(3)]
    store(b, fleet.nodes[1], held)
    unheard = [fresh_prompt() for _ in range(3)]
    expected = {prompt: reference_pair(reference, prompt) for prompt in (*held, *unheard)}
    lines, waits = log_lines(node), waits_of(a)
    with outage(fleet):
        for prompt in (held[0], unheard[0]):
            assert a.complete(prompt) == expected[prompt].cold
        wait_for(lambda: node.stats()["valkey"]["state"] == state, seconds=20, what=f"the tier is {state}")
        wait_for(lambda: open_breakers(node) == 3, seconds=20, what="every shard shows in the metrics")
        wait_for(lambda: shown_state(node, state) == 1, seconds=5, what="the tier's state shows in the metrics")
        asked = blocks_asked_in_all(node)
        for prompt in (*held[1:], *unheard[1:]):
            assert a.complete(prompt) == expected[prompt].cold
        assert blocks_asked(node) == asked, "a shard that is known to be down is asked"
    assert_used_again(fleet, reference)
    assert waits_of(a) == waits
    assert_said_once(node, log_lines(node)[len(lines) :], aspect="breaker", shards=3, state=state)


def test_full_valkey_is_read_from_and_its_refusals_are_said_once(fleet: Stack, reference: Engine) -> None:
    (a, b), node = fleet.engines, fleet.nodes[0]
    settle(node)
    held, unheard = [fresh_prompt() for _ in range(2)], [fresh_prompt() for _ in range(4)]
    store(b, fleet.nodes[1], held)
    expected = {prompt: reference_pair(reference, prompt) for prompt in (*held, *unheard)}
    lines, waits = log_lines(node), waits_of(a)
    with full(fleet):
        for prompt in unheard:
            assert a.complete(prompt) == expected[prompt].cold
        wait_for(lambda: not is_well(node), seconds=20, what="the refusals show in the agent's stats")
        wait_for(lambda: drops(node) > 0, seconds=20, what="dropped writes show in the metrics")
        for prompt in held:
            assert_loaded(a, prompt, expected[prompt])
    assert_used_again(fleet, reference)
    assert waits_of(a) == waits
    assert_said_once(node, log_lines(node)[len(lines) :], aspect="writes", shards=1, state=None)


def store(engine: Engine, node: Node, prompts: Sequence[str]) -> None:
    """Compute prompts and have them written to Valkey."""
    for prompt in prompts:
        engine.complete(prompt)
    settle(node)


def assert_loaded(engine: Engine, prompt: str, expected: Pair) -> None:
    loads = Loads(engine)
    assert engine.complete(prompt) == expected.cached
    assert loads.by_tier() == {"ram": 0, "valkey": whole_blocks(prompt)}


def assert_used_again(fleet: Stack, reference: Engine) -> None:
    """What one node writes the other loads."""
    (a, b), prompt = fleet.engines, fresh_prompt()
    for engine, node in zip(fleet.engines, fleet.nodes, strict=True):
        wait_for(
            lambda e=engine, n=node: is_used_again(e, n),  # type: ignore[misc]
            seconds=RECOVERY_SECONDS,
            what="Valkey back in the agent's stats",
        )
        assert node.stats()["valkey"]["write_queue_items"] == 0
    expected = reference_pair(reference, prompt)
    store(b, fleet.nodes[1], [prompt])
    assert_loaded(a, prompt, expected)


def waits_of(engine: Engine) -> list[float]:
    """How often the engine gave its agent up, or a load failed."""
    text = engine.metrics()
    return [metric_sum(text, name) for name in NOBODY_WAITED]


def open_breakers(node: Node) -> int:
    return int(metric_sum(node.metrics(), "kvpool_valkey_breaker_open"))


def shown_state(node: Node, state: str) -> float:
    return metric_sum(node.metrics(), "kvpool_agent_valkey_state", state=state)


def blocks_asked(node: Node) -> float:
    """Blocks that Valkey was asked for, whatever it answered."""
    text = node.metrics()
    return sum(metric_sum(text, "kvpool_valkey_operations_total", op=op) for op in ("get", "exists"))


def blocks_asked_in_all(node: Node) -> float:
    """The same once what was asked before has had its answer, or its time: no more comes for a moment."""
    counted, since = blocks_asked(node), time.monotonic()

    def is_quiet() -> bool:
        nonlocal counted, since
        if (now := blocks_asked(node)) != counted:
            counted, since = now, time.monotonic()
        return time.monotonic() - since > QUIET_SECONDS

    wait_for(is_quiet, seconds=30, what="answers to what Valkey was asked")
    return counted


def drops(node: Node) -> float:
    return metric_sum(node.metrics(), "kvpool_valkey_writes_dropped_total", reason="refused")


def is_well(node: Node) -> bool:
    """Connected, and every shard used for reads and writes."""
    tier = node.stats()["valkey"]
    return tier["state"] == "connected" and set(tier["breakers"].values()) == {"closed"}


def is_used_again(engine: Engine, node: Node) -> bool:
    """Whether a new prompt's blocks are written: a shard that refused writes is tried with the next ones."""
    engine.complete(fresh_prompt(), max_tokens=1)
    node.settle()
    return is_well(node)


def log_lines(node: Node) -> list[dict[str, str]]:
    """What the agent logged about Valkey."""
    lines = [json.loads(line) for line in node.agent.log_text().splitlines() if line.startswith("{")]
    return [line for line in lines if "alkey" in line["message"] and line["level"] != "DEBUG"]


def assert_said_once(
    node: Node, lines: Sequence[dict[str, str]], *, aspect: str, shards: int, state: str | None
) -> None:
    """A line for each change of a shard and of the tier, none for a failure; at least `shards` were bad, and all are well."""
    changes: dict[tuple[str, str], list[str]] = defaultdict(list)
    others = []
    for line in lines:
        if change := re.match(r"valkey shard=(\S+) (breaker|writes)=(\w+)", line["message"]):
            changes[change[1], change[2]].append(change[3])
        elif "state" in line:
            changes["", "tier"].append(line["state"])
        else:
            others.append(line["message"])
    for (shard, kind), said in changes.items():
        assert all(former != later for former, later in pairwise(said)), f"{shard} {kind} was said twice: {said}"
        if kind != "tier":
            assert said[0] == BAD_STATES[kind], f"{shard} {kind} was well: {said}"
            assert len(said) % 2 == 0, f"{shard} {kind} is well again: {said}"
    assert sum(kind == aspect for _, kind in changes) >= shards
    assert state is None or state in changes["", "tier"]
    assert len(others) == len(set(others)), f"said more than once: {others}"
    assert set(node.stats()["valkey"]["breakers"].values()) == {"closed"}
