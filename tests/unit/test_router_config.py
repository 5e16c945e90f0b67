"""The router's configuration file is checked whole, and errors name key and remedy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_core.errors import ConfigError
from kvpool_router.config import endpoint_address, load_config, parse_config, read_token

WHOLE = """
pool: {namespace: inference, name: chat}
listen: {host: 127.0.0.1, port: 8080}
admin: {host: 127.0.0.1, port: 8081, token_file: /t}
endpoints:
- {url: "http://127.0.0.1:8001", agent: a}
- {url: "http://[::1]:8002/"}
agents:
- {name: a, url: "http://127.0.0.1:9001", token_file: /t}
"""
FOUND = "discovery: {kubernetes: {namespaces_file: /n, token_file: /a}}\n"
DISCOVERING = "pool: {namespace: inference, name: chat}\nadmin: {token_file: /t}\n" + FOUND
MINIMAL = "admin: {token_file: /t}\nendpoints: []\n"


def test_whole_file_is_understood() -> None:
    config = parse_config(WHOLE)
    assert [endpoint_address(endpoint) for endpoint in config.endpoints or ()] == ["127.0.0.1:8001", "[::1]:8002"]
    assert [agent.name for agent in config.agents] == ["a"]


def test_discovery_takes_the_place_of_endpoints_and_agents() -> None:
    config = parse_config(DISCOVERING)
    assert config.endpoints is None
    assert config.discovery is not None
    assert config.discovery.kubernetes.agent_port == 8081


def test_defaults_make_a_working_router() -> None:
    config = parse_config(MINIMAL)
    assert config.listen.port == 8080
    assert config.tokenization.base_seconds == 0.25


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "`admin` and `endpoints` or `discovery`"),
        ("admin: {token_file: /t}", "exactly one of `endpoints` and `discovery`"),
        (MINIMAL + FOUND, "exactly one of `endpoints` and `discovery`"),
        ("admin: {token_file: /t}\n" + FOUND, "pool.namespace is missing"),
        (
            DISCOVERING + "agents: [{name: a, url: 'http://a:1', token_file: /t}]",
            "`agents` is given besides `discovery`",
        ),
        (MINIMAL + "max_body_bytes: 300000000\n", "max_body_bytes is 300000000; use a number above 0 and up to"),
        (DISCOVERING.replace("token_file: /a", "token_file: /a, agent_port: 70000"), "agent_port is 70000"),
        (DISCOVERING.replace("token_file: /a", "token: /a"), "unknown key `discovery.kubernetes.token`"),
        (DISCOVERING.replace("token_file: /a", "token: /a"), "namespaces_file"),
        ("- 1", "mapping"),
        ("a: [", "not YAML"),
        ("endpoints: []", "`admin`"),
        (MINIMAL + "shards: 3", "unknown key `shards`"),
        (MINIMAL + "scoring: {ram_seconds: 1}", "unknown key `scoring.ram_seconds`"),
        (MINIMAL + "scoring: {ram_seconds: 1}", "ram_seconds_per_token"),
        (MINIMAL + "timeouts: {probe_seconds: 0}", "timeouts.probe_seconds is 0"),
        (MINIMAL + "timeouts: {probe_seconds: soon}", "timeouts.probe_seconds"),
        (MINIMAL + "tenancy: {missing: Maybe}", "tenancy.missing"),
        (MINIMAL + "listen: {port: 70000}", "listen.port is 70000"),
        ("admin: {token_file: /t}\nendpoints: [{url: 'http://a:1', agent: b}]", "no agent is named `b`"),
        ("admin: {token_file: /t}\nendpoints: [{url: 'http://a:1'}, {url: 'http://a:1/'}]", "more than once"),
        ("admin: {token_file: /t}\nendpoints: [{url: 'a:1'}]", "write http://host:port"),
        ("admin: {token_file: /t}\nendpoints: [{url: 'http://a:1/v1'}]", "write http://host:port"),
        ("admin: {token_file: /t}\nendpoints: [{url: 'http://a:99999'}]", "write http://host:port"),
        ("admin: {token_file: /t}\nendpoints: [{url: 'http://a:1', agnet: b}]", "unknown key `endpoints[0].agnet`"),
        (MINIMAL + "agents: [{name: a, url: 'http://a:1'}]", "token_file"),
    ],
)
def test_wrong_file_is_an_error_that_names_key_and_remedy(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    assert named in str(error.value)


def test_unreadable_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "binary.yaml")


def test_empty_token_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        read_token(str(tmp_path / "token"), "admin.token_file")


@settings(max_examples=50)
@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_config(text)
