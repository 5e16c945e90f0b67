"""What the connector is told: defaults, overrides, and errors that name the key."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvpool_core.errors import ConfigError
from kvpool_vllm.settings import read_settings

ENVIRON = {"KVPOOL_SOCKET": "/run/kvpool/agent.sock", "KVPOOL_ENDPOINT": "10.0.0.1:8000"}


def test_defaults_hold_and_keys_of_vllm_are_left_to_vllm() -> None:
    settings = read_settings(ENVIRON, {"canonical_layout": True, "offload_prompt_only": False, "spec_name": "x"})
    assert settings.socket_path == "/run/kvpool/agent.sock"
    assert settings.endpoint == "10.0.0.1:8000"
    assert settings.verdict_deadline_seconds == 0.05


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fd00::5:8000", "[fd00::5]:8000"),
        ("[fd00::5]:8000", "[fd00::5]:8000"),
        ("engine:8000", "engine:8000"),
        ("", ""),
    ],
)
def test_an_ipv6_endpoint_is_written_as_routers_do(given: str, expected: str) -> None:
    assert read_settings({**ENVIRON, "KVPOOL_ENDPOINT": given}, {}).endpoint == expected


def test_a_deadline_can_be_set() -> None:
    assert read_settings(ENVIRON, {"kvpool_verdict_deadline_seconds": 1}).verdict_deadline_seconds == 1.0


def test_the_prefill_rate_can_be_fixed() -> None:
    assert read_settings(ENVIRON, {"kvpool_prefill_tokens_per_second": 500}).prefill_tokens_per_second == 500.0


def test_numbers_come_from_the_environment_too_and_the_extra_config_wins() -> None:
    environ = {
        **ENVIRON,
        "KVPOOL_PREFILL_TOKENS_PER_SECOND": "500",
        "KVPOOL_PAUSE_SECONDS": "2.5",
        "KVPOOL_JOB_DEADLINE_SECONDS": "",
        "KVPOOL_ROUTER_SERVICE_HOST": "10.0.0.9",  # of a Service named kvpool-router
    }
    settings = read_settings(environ, {"kvpool_pause_seconds": 1})
    assert (settings.prefill_tokens_per_second, settings.pause_seconds) == (500.0, 1.0)
    assert settings.job_deadline_seconds == 5.0


@pytest.mark.parametrize(
    ("environ", "extra", "named"),
    [
        ({}, {}, "KVPOOL_SOCKET"),
        (ENVIRON, {"kvpool_verdict_deadline": 1}, "kvpool_verdict_deadline"),
        (ENVIRON, {"verdict_deadline_seconds": 1}, "verdict_deadline_seconds"),
        (ENVIRON, {"kvpool_socket_path": "/x"}, "kvpool_socket_path"),
        (ENVIRON, {"kvpool_pause_seconds": "5"}, "kvpool_pause_seconds"),
        (ENVIRON, {"kvpool_pause_seconds": -1}, "kvpool_pause_seconds"),
        (ENVIRON, {"kvpool_pause_seconds": True}, "kvpool_pause_seconds"),
        (ENVIRON, {"kvpool_pause_seconds": math.inf}, "kvpool_pause_seconds"),
        (ENVIRON, {"kvpool_pause_seconds": math.nan}, "kvpool_pause_seconds"),
        ({**ENVIRON, "KVPOOL_PAUSE_SECONDS": "soon"}, {}, "KVPOOL_PAUSE_SECONDS"),
        ({**ENVIRON, "KVPOOL_PAUSE_SECONDS": "-1"}, {}, "KVPOOL_PAUSE_SECONDS"),
        ({**ENVIRON, "KVPOOL_PAUSE_SECONDS": "nan"}, {}, "KVPOOL_PAUSE_SECONDS"),
    ],
)
def test_wrong_settings_are_errors_that_name_the_key(
    environ: dict[str, str], extra: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_settings(environ, extra)


def test_token_is_read_at_each_use(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = read_settings({**ENVIRON, "KVPOOL_TOKEN_FILE": str(file)}, {})
    for token in ("one", "two"):
        file.write_text(token + "\n")
        assert settings.read_token() == token
