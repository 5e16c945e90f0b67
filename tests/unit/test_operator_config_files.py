"""The files that the operator writes are read by the programs that it writes them for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool_agent.config import Config
from kvpool_agent.config import parse_config as parse_agent
from kvpool_operator.plan import agent, router
from kvpool_operator.pool import Pool
from kvpool_router.config import parse_config as parse_router
from tests.unit.operator_pools import EXTERNAL, MANAGED, make_pool

ROOT = Path(__file__).resolve().parents[2]


def agent_config(pool: Pool) -> Config:
    """The agent's file, read by the agent."""
    return parse_agent(agent.agent_yaml(pool))


def test_agent_reads_its_file_of_a_managed_pool() -> None:
    config = agent_config(make_pool(valkey=MANAGED))

    assert (config.pool.namespace, config.pool.name) == ("inference", "chat")
    assert config.ram.capacity_bytes == 1 << 30
    assert config.authentication == "kubernetes"
    assert config.valkey is not None
    assert config.valkey.endpoints == ["chat-valkey.inference.svc:6379"]
    assert config.valkey.key_prefix == "kvpool:inference/chat:"
    assert config.valkey.username == "agent"


def test_agent_reads_its_file_of_an_external_pool() -> None:
    config = agent_config(make_pool(valkey=EXTERNAL))

    assert config.valkey is not None
    assert config.valkey.username_file == "/etc/kvpool-valkey/username"
    assert config.valkey.password_file == "/etc/kvpool-valkey/password"
    assert config.valkey.key_prefix == "kvpool:inference/chat:"


def test_agent_reads_its_file_without_a_shared_tier() -> None:
    assert agent_config(make_pool()).valkey is None


def test_longest_names_fit() -> None:
    pool = make_pool(metadata={"namespace": "n" * 63, "name": "p" * 40}, valkey=MANAGED)

    assert agent_config(pool).valkey is not None
    assert len(agent_config(pool).socket_path.as_posix()) < 107


def test_router_reads_its_file() -> None:
    config = parse_router(router.router_yaml(make_pool()))

    assert (config.pool.namespace, config.pool.name) == ("inference", "chat")
    assert config.discovery is not None
    assert config.listen.port == 8080


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("pool*.yaml")), ids=lambda path: path.name)
def test_examples_become_files_that_are_read(path: Path) -> None:
    raw: dict[str, Any] = yaml.safe_load(path.read_text())
    pool = make_pool(metadata=raw["metadata"], **raw["spec"])

    assert agent_config(pool).ram.capacity == pool.capacity
    assert parse_router(router.router_yaml(pool)).pool.name == pool.name
