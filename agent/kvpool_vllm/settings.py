"""What the connector is told from outside: environment of the pod and `kv_connector_extra_config`.

Read once, when a connector is made. Every default stands here, with its unit and its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpool_core.errors import ConfigError

SPEC_NAME = "KvpoolSpec"
SPEC_MODULE = "kvpool_vllm.spec"

_PREFIX = "kvpool_"
_OF_VLLM = {
    "spec_name",
    "spec_module_path",
    "canonical_layout",
    "offload_prompt_only",
    "self_describing_kv_events",
    "blocks_per_chunk",
    "block_size",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine's connector; times in seconds."""

    socket_path: str
    token_file: str = ""
    endpoint: str = ""
    """`ip:port` under which the router reaches this engine; empty: the engine is not offered to routers."""
    verdict_deadline_seconds: float = 0.05
    """Without a verdict for this long (or 5 % of the time to recompute, if that is longer) a lookup is a miss."""
    verdicts_missed_before_pause: int = 3
    pause_seconds: float = 5.0
    """After that many missed verdicts in a row nothing is asked for this long: a hung agent must not cost every request."""
    pending_deadline_seconds: float = 10.0
    """Upper bound of waiting for blocks being fetched, where the engine's prefill rate is not known yet."""
    reserve_deadline_seconds: float = 1.0
    """Wait of the copy thread (never of the engine) for slots."""
    job_deadline_seconds: float = 5.0
    """A store older than this is given up: its source blocks are wanted back."""

    prefill_tokens_per_second: float = 0.0
    """Rate by which loading is weighed against recomputing; 0: the engine's own, as measured."""

    def read_token(self) -> str:
        """The pod-bound token, read at each connect because the kubelet renews it; "" where none is configured."""
        return Path(self.token_file).read_text().strip() if self.token_file else ""


_NUMBERS = [name for name in Settings.__slots__ if name.endswith(("_seconds", "_per_second"))]


def read_settings(environ: Mapping[str, str], extra: Mapping[str, object]) -> Settings:
    """Settings from KVPOOL_SOCKET, KVPOOL_TOKEN_FILE, KVPOOL_ENDPOINT; numbers from the extra config's `kvpool_*` keys, else
    from variables of the same names in capitals: a pod that the webhook injects has no extra config of its own.

    ConfigError names a key that is unknown or not a number. Other variables that begin with KVPOOL_ are not ours: Kubernetes
    makes them for Services.
    """
    socket_path = environ.get("KVPOOL_SOCKET", "")
    if not socket_path:
        raise ConfigError("KVPOOL_SOCKET is not set: give the path of the agent's socket, as /run/kvpool/agent.sock")
    numbers = _numbers_of_environment(environ)
    for key, value in extra.items():
        if key in _OF_VLLM:
            continue
        name = key.removeprefix(_PREFIX)
        if not key.startswith(_PREFIX) or name not in _NUMBERS:
            known = sorted(_PREFIX + number for number in _NUMBERS)
            raise ConfigError(
                f"kv_connector_extra_config: unknown key `{key}`: remove it or use one of {', '.join(known)}"
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_positive(value):
            raise ConfigError(f"kv_connector_extra_config: `{key}` must be a positive number, is {value!r}")
        numbers[name] = float(value)
    return Settings(
        socket_path=socket_path,
        token_file=environ.get("KVPOOL_TOKEN_FILE", ""),
        endpoint=_bracketed(environ.get("KVPOOL_ENDPOINT", "")),
        **numbers,  # type: ignore[arg-type]
    )


def _numbers_of_environment(environ: Mapping[str, str]) -> dict[str, float]:
    variables = {name: (_PREFIX + name).upper() for name in _NUMBERS}
    return {name: _number(variable, environ[variable]) for name, variable in variables.items() if environ.get(variable)}


def _number(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not _is_positive(value):
        raise ConfigError(f"{variable} must be a positive number, is {text!r}: correct or remove it")
    return value


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _bracketed(endpoint: str) -> str:
    """`ip:port` as routers write it: the webhook cannot tell an IPv6 address, which has brackets, from another."""
    host, _, port = endpoint.rpartition(":")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else endpoint
