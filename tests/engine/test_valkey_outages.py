"""Valkey unreachable, hanging, full, with another password: engines serve as fast as without it, and it is said once."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import redis

from tests.engine.answers import reference_pair
from tests.engine.conftest import fresh_prompt, settle, wait_for
from tests.harness.engine import Engine
from tests.harness.node import Node
from tests.harness.stack import Stack

RECOVERY_SECONDS = 30.0


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


@pytest.mark.parametrize("outage", [unreachable, hanging, full, another_password])
def test_requests_are_as_fast_as_without_valkey_and_the_state_is_said_once(
    fleet: Stack, reference: Engine, outage: Outage
) -> None:
    a, node = fleet.engines[0], fleet.nodes[0]
    settle(node)
    prompts = [fresh_prompt() for _ in range(4)]
    expected = [reference_pair(reference, prompt).cold for prompt in prompts]
    alone = statistics.median(timed(reference, fresh_prompt()) for _ in range(4))
    lines = len(state_lines(node))
    with outage(fleet):
        started = time.monotonic()
        answers, seconds = [], []
        for prompt in prompts:
            before = time.monotonic()
            answers.append(a.complete(prompt))
            seconds.append(time.monotonic() - before)
        assert answers == expected
        # generous: the machine is small; a request that waited for Valkey would take its timeouts, seconds each
        assert statistics.median(seconds) < 2 * alone + 0.5
        wait_for(lambda: not is_well(node), seconds=20, what="the outage shows in the agent's stats")
        lasted = time.monotonic() - started
    wait_for(lambda: is_used_again(a, node), seconds=RECOVERY_SECONDS, what="Valkey back in the agent's stats")
    said = state_lines(node)[lines:]
    assert said, "the outage is in the log"
    assert len(said) <= 12, f"a line per change of state, not per failure ({lasted:.0f} s): {said}"
    prompt = fresh_prompt()
    a.complete(prompt, max_tokens=1)
    settle(node)
    assert node.stats()["valkey"]["write_queue_items"] == 0


def timed(engine: Engine, prompt: str) -> float:
    before = time.monotonic()
    engine.complete(prompt)
    return time.monotonic() - before


def is_well(node: Node) -> bool:
    """Connected, and every shard used for reads and writes."""
    tier = node.stats()["valkey"]
    return tier["state"] == "connected" and set(tier["breakers"].values()) == {"closed"}


def is_used_again(engine: Engine, node: Node) -> bool:
    """Whether a new prompt's blocks are written: a shard that refused writes is tried with the next ones."""
    engine.complete(fresh_prompt(), max_tokens=1)
    node.settle()
    return is_well(node)


def state_lines(node: Node) -> list[str]:
    """Log lines of the agent about Valkey."""
    return [line for line in node.agent.log_text().splitlines() if "alkey" in line and '"level": "DEBUG"' not in line]
