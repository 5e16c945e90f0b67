"""The `valkey` section of the agent's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from valkey.exceptions import AuthenticationError

from kvpool_agent.valkey_connection import CredentialFiles
from kvpool_agent.valkey_settings import ValkeySettings, parse_endpoint
from kvpool_core.errors import ConfigError


def settings(**changes: Any) -> ValkeySettings:
    return ValkeySettings(**{"endpoints": ["cache:6379"], **changes})


def test_defaults_are_valid() -> None:
    settings().validate()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoints", []),
        ("endpoints", [f"h{i}:1" for i in range(33)]),
        ("endpoints", ["h:1", "h:1"]),
        ("endpoints", ["host"]),
        ("endpoints", ["host:0"]),
        ("endpoints", ["host:65536"]),
        ("endpoints", ["host:x"]),
        ("endpoints", [":6379"]),
        ("endpoints", ["::1:6379"]),
        ("endpoints", ["a b:6379"]),
        ("key_prefix", "x" * 65),
        ("key_prefix", "a{b"),
        ("key_prefix", "a b"),
        ("key_prefix", "a\x00b"),
        ("username", "user"),
        ("username_file", "/etc/valkey/username"),
        ("ttl_seconds", 59),
        ("connect_timeout_seconds", 0.0),
        ("base_timeout_seconds", 61.0),
        ("timeout_seconds_per_mib", -1.0),
        ("write_queue_bytes", -1),
        ("read_threads", 0),
        ("write_threads", 65),
        ("breaker_failures", 0),
        ("breaker_open_seconds", float("nan")),
    ],
)
def test_wrong_value_is_refused_naming_key_and_remedy(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^valkey\.{key} .*; "):
        settings(**{key: value}).validate()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoints", ["[::1]:6379", "10.0.0.1:1"]),
        ("key_prefix", "x" * 64),
        ("key_prefix", f"kvpool:{'n' * 63}/{'p' * 40}:"),
        ("ttl_seconds", 60),
        ("write_policy", "ReadOnly"),
    ],
)
def test_value_at_the_limit_is_taken(key: str, value: object) -> None:
    settings(**{key: value}).validate()


def test_unknown_key_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="endpoint"):
        msgspec.convert({"endpoints": ["h:1"], "endpoint": "h:1"}, ValkeySettings)


@pytest.mark.parametrize("topology", ["Ring", "cluster"])
def test_unknown_topology_is_refused(topology: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"endpoints": ["h:1"], "topology": topology}, ValkeySettings)


def test_endpoint_is_split() -> None:
    assert parse_endpoint("cache.ns.svc:6379") == ("cache.ns.svc", 6379)
    assert parse_endpoint("[fe80::1]:7000") == ("fe80::1", 7000)


def test_username_is_given_in_one_way() -> None:
    with pytest.raises(ConfigError, match=r"^valkey\.username_file is set besides valkey\.username; keep one of them"):
        settings(username="a", username_file="/u", password_file="/p").validate()


@pytest.mark.parametrize(
    ("username", "credentials"), [("kvpool\n", ("kvpool", "secret")), ("", ("secret",)), (None, ("secret",))]
)
def test_credentials_are_read_from_files_and_no_username_is_the_default_user(
    tmp_path: Path, username: str | None, credentials: tuple[str, ...]
) -> None:
    (tmp_path / "password").write_text("secret\n")
    if username is not None:
        (tmp_path / "username").write_text(username)
    provider = CredentialFiles(tmp_path / "password", username=None, username_file=tmp_path / "username")
    assert provider.get_credentials() == credentials
    (tmp_path / "password").unlink()
    with pytest.raises(AuthenticationError, match="password file"):
        provider.get_credentials()
