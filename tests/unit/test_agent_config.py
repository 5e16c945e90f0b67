"""The agent's configuration file: what is accepted, and what a wrong one is told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.config import load_config, parse_config
from kvpool_agent.quantity import parse_quantity
from kvpool_core.errors import ConfigError

GOOD = """
pool: {namespace: inference, name: chat}
node: node-a
socket_folder: /run/kvpool
holder_socket: /run/kvpool/holder.sock
admin: {port: 9400, token_file: /run/token}
ram: {capacity: 64Gi, huge_page_size: 2Mi}
"""


def test_defaults_are_those_of_the_design() -> None:
    config = parse_config(GOOD)
    assert (config.lease_seconds, config.max_lease_fraction, config.authentication) == (10.0, 0.25, "none")
    assert (config.ram.capacity_bytes, config.ram.huge_page_bytes) == (64 << 30, 2 << 20)
    assert (config.ram.eviction_policy, config.valkey, config.log_level) == ("LRU", None, "INFO")
    assert str(config.socket_path) == "/run/kvpool/agent.sock"


def test_node_is_named_by_file_then_environment_then_host(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(GOOD)
    assert load_config(file, {"KVPOOL_NODE": "other"}).node == "node-a"
    file.write_text(GOOD.replace("node: node-a\n", ""))
    assert load_config(file, {"KVPOOL_NODE": "node-b"}).node == "node-b"
    assert load_config(file, {}).node == socket.gethostname()


def test_kubernetes_authentication_with_its_namespaces_is_accepted() -> None:
    config = parse_config(GOOD + "authentication: kubernetes\nallowed_namespaces_file: /etc/ns/allowed\n")
    assert (config.authentication, config.allowed_namespaces_file) == ("kubernetes", "/etc/ns/allowed")


def test_valkey_prefix_names_the_pool_unless_given() -> None:
    config = parse_config(GOOD + "valkey: {endpoints: ['127.0.0.1:6379']}\n")
    assert config.valkey is not None
    assert config.valkey.key_prefix == "kvpool:inference/chat:"
    given_prefix = parse_config(GOOD + "valkey: {endpoints: ['127.0.0.1:6379'], key_prefix: 'mine:'}\n")
    assert given_prefix.valkey is not None
    assert given_prefix.valkey.key_prefix == "mine:"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("node: node-a", "nodename: a"), "nodename: unknown key: remove it or use one of: admin, allowed_namespaces"),
        (("capacity:", "size:"), "ram.size: unknown key: remove it or use one of: capacity, eviction_policy, huge"),
        (("port: 9400, ", ""), "admin.port: required key is missing"),
        (("9400", "70000"), "admin.port: 70000 is out of range"),
        (("9400", "'9400'"), "admin.port: Expected `int`, got `str`"),
        (("64Gi", "64GB"), "ram.capacity: '64GB' is not a quantity: use a whole number with Mi, Gi or Ti"),
        (("64Gi", "32Mi"), "ram.capacity: 32Mi is out of range: use 64Mi to 16Ti"),
        (("64Gi", "17Ti"), "ram.capacity: 17Ti is out of range"),
        (("64Gi", "65Mi"), "ram.huge_page_size: 2Mi does not divide"),
        (("2Mi", "4Ki"), "ram.huge_page_size: '4Ki' is not supported"),
        (("node: node-a", "ram: {capacity: 64Mi, eviction_policy: ARC}"), "ram.eviction_policy"),
        (("/run/kvpool\n", "run/kvpool\n"), "socket_folder: 'run/kvpool/agent.sock' is relative"),
        (("/run/kvpool\n", "/" + "x" * 120 + "\n"), "is longer than 107 bytes"),
        (("name: chat", "name: Chat"), "pool.name: 'Chat' is not a DNS label"),
        (("node: node-a", "lease_seconds: 0"), "lease_seconds: 0.0 is out of range"),
        (("node: node-a", "lease_seconds: 0.9"), "lease_seconds: 0.9 is out of range: use 1.0 to 600.0"),
        (("node: node-a", "max_lease_fraction: 2"), "max_lease_fraction: 2.0 is out of range"),
        (("node: node-a", "authentication: kubernetes"), "allowed_namespaces_file: '' is no absolute path"),
        (("node: node-a", "allowed_namespaces_file: /x"), "set authentication to kubernetes"),
        (("node: node-a", "drain_seconds: -1"), "drain_seconds: -1.0 is out of range"),
        (("node: node-a", "valkey: {endpoint: x}"), "valkey.endpoint: unknown key"),
        (("node: node-a", "valkey: {endpoints: [x]}"), "valkey.endpoints"),
        (("node: node-a", "node: [}"), "is not YAML"),
    ],
)
def test_wrong_files_are_refused_naming_key_and_remedy(change: tuple[str, str], message: str) -> None:
    text = GOOD.replace(*change)
    if "eviction_policy" in change[1]:
        text = GOOD.replace("ram: {capacity: 64Gi, huge_page_size: 2Mi}", change[1])
    with pytest.raises(ConfigError, match=_escape(message)):
        parse_config(text)


def _escape(text: str) -> str:
    return "".join(f"\\{character}" if character in "[](){}.`*+?" else character for character in text)


@pytest.mark.parametrize("text", ["", "[]", "- a", "3", "null"])
def test_documents_that_are_no_mapping_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)


def test_missing_file_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path_factory.mktemp("x") / "none.yaml", {})


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)


@given(st.integers(1, 999_999_999), st.sampled_from(["Mi", "Gi", "Ti"]))
def test_quantities_are_whole_numbers_of_binary_units(count: int, unit: str) -> None:
    assert parse_quantity(f"{count}{unit}") == count * {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


@pytest.mark.parametrize("text", ["", "0Mi", "1", "1.5Gi", "-1Gi", "01Gi", "1 Gi", "1Gi\n", "1Ki", "9999999999Ti"])
def test_other_quantities_are_refused(text: str) -> None:
    assert parse_quantity(text) is None
