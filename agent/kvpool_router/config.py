"""The router's configuration file: one YAML document, checked whole at start.

Invariant: a RouterConfig that exists is complete and consistent; all else is a ConfigError that names the key and the
remedy. The operator writes exactly this file. Every default is stated here, once, with its unit and reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import yaml

from kvpool_core.errors import ConfigError
from kvpool_router.addresses import join_address


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: unknown keys are errors."""


class Listen(_Section, frozen=True, kw_only=True):
    """Where clients connect."""

    host: str = "127.0.0.1"
    """Loopback: whoever wants clients from outside says so. `*`: every address, IPv4 and IPv6."""
    port: int = 8080
    """0 takes a free one and logs it."""


class Admin(_Section, frozen=True, kw_only=True):
    """Where operators and probes connect."""

    host: str = "127.0.0.1"
    """Loopback: whoever wants the API from outside says so. `*`: every address, IPv4 and IPv6."""
    port: int = 8081
    """0 takes a free one and logs it."""
    token_file: str
    """Holds the bearer token of everything but health and metrics; read anew for each call, so that it may be rotated."""


class Endpoint(_Section, frozen=True, kw_only=True):
    """An engine."""

    url: str
    """`http://host:port` of its OpenAI API."""
    agent: str = ""
    """Name of its node's agent; empty: whichever agent reports an engine of this address."""
    api_key_file: str = ""
    """Holds the key with which the engine's /v1/models is read; empty for engines without one."""


class Agent(_Section, frozen=True, kw_only=True):
    """A node's agent."""

    name: str
    """How endpoints, logs, metrics and the route header name it."""
    url: str
    """`http://host:port` of its admin API."""
    token_file: str
    """Holds the bearer token of its event stream; read anew for each subscription."""


class KubernetesDiscovery(_Section, frozen=True, kw_only=True):
    """Engines and agents are the pool's pods, found by their labels."""

    namespaces_file: str
    """Namespaces whose engines count, one a line, or `*`; read again when it changes."""
    token_file: str
    """Holds the bearer token of the agents' event streams; read anew for each subscription."""
    agent_port: int = 8081
    """Admin port of the agents."""


class Discovery(_Section, frozen=True, kw_only=True):
    """Where engines and agents are found, in place of `endpoints` and `agents`."""

    kubernetes: KubernetesDiscovery


class Scoring(_Section, frozen=True, kw_only=True):
    """Weights of the expected time to first token. Costs are seconds per token, tokens those of the prompt."""

    default_tokens_per_second: float = 4000.0
    """Prefill rate until one was measured: only its ratio to the load costs matters then."""
    ram_seconds_per_token: float = 5e-6
    """Arena to GPU: 25 GB/s at 128 KiB per token (8B model, bf16)."""
    valkey_seconds_per_token: float = 5e-5
    """Valkey to GPU: 2.5 GB/s at 128 KiB per token."""
    running_seconds: float = 0.002
    """What each request already in flight adds to a step of the engine."""
    close_fraction: float = 0.10
    """Scores count as close within this part of the prompt's cold prefill time ..."""
    close_seconds: float = 0.005
    """... or within this time, whichever is more: affinity decides then."""
    own_fraction: float = 0.5
    """An endpoint that holds this part of a prompt holds the conversation itself, not just a shared start."""
    affinity_blocks: int = 2
    """Blocks whose hash spreads prompts over close endpoints: 1 would put everybody with one system prompt together."""
    hot_ratio: float = 2.0
    """An endpoint is hot when its recent requests exceed this multiple of the others' mean ..."""
    hot_requests: float = 16.0
    """... by at least this many; a shared start then counts for nothing there."""
    recent_half_life_seconds: float = 30.0
    """How fast past requests fade from `hot`."""


class Tokenization(_Section, frozen=True, kw_only=True):
    """Asking engines for token ids. Deadline = base + per 1,000 characters, at most max; late means routing by load."""

    base_seconds: float = 0.25
    """A busy node's API server took 0.17 s at p95 where an idle one takes 0.01 s."""
    per_thousand_chars_seconds: float = 0.1
    """About what 250 tokens take to prefill: waiting as long as the prompt's own prefill still pays when it then hits."""
    max_seconds: float = 3.0
    """Beyond, knowing the prefix hardly pays for the wait."""
    cache_tokens: int = 2_000_000
    """Bound of the cache of recent answers, in tokens (about 36 bytes each)."""


class Index(_Section, frozen=True, kw_only=True):
    """The prefix index and its event streams."""

    max_entries: int = 4_000_000
    """Blocks indexed at most (about 120 bytes each); the oldest are dropped beyond."""
    silence_seconds: float = 10.0
    """A stream without a frame for this long is dead: agents send one every few seconds."""
    stale_seconds: float = 5.0
    """How long the entries of an agent that was lost still count."""
    backoff_min_seconds: float = 0.2
    """First pause before subscribing again; doubled up to the longest, with jitter."""
    backoff_max_seconds: float = 5.0
    """Longest pause: an agent that came back is followed again at most this much later."""
    speculative_seconds: float = 2.0
    """How long a routed request's blocks count as held before any event confirms them."""


class Timeouts(_Section, frozen=True, kw_only=True):
    """Deadlines of the proxy, in seconds."""

    connect_seconds: float = 2.0
    """To connect to an engine: nodes of one cluster answer in milliseconds."""
    body_seconds: float = 60.0
    """For a request's whole body, else 408: one that comes in drops would hold the room of others."""
    idle_seconds: float = 600.0
    """Between two pieces of a streamed answer; an engine under load may take minutes to the first."""
    whole_answer_seconds: float = 3600.0
    """Until an answer that is not streamed: the engine sends nothing before it is complete, and long ones take long."""
    probe_interval_seconds: float = 1.0
    """Between two probes of an endpoint's health."""
    probe_seconds: float = 1.0
    """For a probe's answer, and for that of /v1/models."""
    probe_failures: int = 3
    """Probes without an answer in a row until an endpoint is silent; a refused connection takes it down at once."""
    models_interval_seconds: float = 10.0
    """How often the list of served models and adapters is read again."""
    grace_seconds: float = 30.0
    """After SIGTERM: time for requests in flight."""
    retry_after_seconds: int = 1
    """What a 503 tells clients to wait: a down endpoint is noticed to be back within a probe's interval."""


class Tenancy(_Section, frozen=True, kw_only=True):
    """The tenant's salt. The header is set by a trusted gateway and becomes `cache_salt` of the forwarded body."""

    header: str = "x-kvpool-tenant"
    """Request header that names the tenant; not forwarded."""
    missing: Literal["Shared", "Reject"] = "Shared"
    """Requests without it: share one cache, or are refused with 400."""
    trust_client_salt: bool = False
    """Keep a `cache_salt` that the client wrote itself; only where clients are trusted with each other's cache."""


class Pool(_Section, frozen=True, kw_only=True):
    """The KVCachePool that this router serves; labels logs, and names the pods to look for."""

    namespace: str = ""
    name: str = ""


class RouterConfig(_Section, frozen=True, kw_only=True):
    """The whole file."""

    pool: Pool = msgspec.field(default_factory=Pool)
    listen: Listen = msgspec.field(default_factory=Listen)
    admin: Admin
    endpoints: list[Endpoint] | None = None
    """The engines; exactly one of this and `discovery`."""
    agents: list[Agent] = []
    """The agents of their nodes; without any, requests go by load."""
    discovery: Discovery | None = None
    """Finds engines and agents by itself."""
    scoring: Scoring = msgspec.field(default_factory=Scoring)
    tokenization: Tokenization = msgspec.field(default_factory=Tokenization)
    index: Index = msgspec.field(default_factory=Index)
    timeouts: Timeouts = msgspec.field(default_factory=Timeouts)
    tenancy: Tenancy = msgspec.field(default_factory=Tenancy)
    max_body_bytes: int = 16 * 1024 * 1024
    """Larger requests are answered 413: a prompt of a million tokens is about 5 MB, an image some hundred KB to a few MB."""
    max_bodies_bytes: int = 256 * 1024 * 1024
    """Bodies of all requests whose answers have not begun, queued ones with them; beyond, 503. While a prompt is tokenized its
    body takes thrice that."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def load_config(path: Path) -> RouterConfig:
    """Read and check the file at `path`; ConfigError says what is wrong and what to do."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}; name a readable file with --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} is not UTF-8 text: {error}") from error
    return parse_config(text)


def parse_config(text: str) -> RouterConfig:
    """Parse and check the text of a configuration file."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(
            "the configuration must be a YAML mapping with at least `admin` and `endpoints` or `discovery`"
        )
    try:
        config = msgspec.convert(raw, RouterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from error
    _check(config)
    return config


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")


def _explain(message: str) -> str:
    """msgspec's message with the key's whole name and, for an unknown one, the names that exist there."""
    found = _UNKNOWN.search(message)
    if found is None:
        return f"the configuration is wrong: {message}; correct the value"
    path = found["path"] or ""
    key = f"{path}.{found['field']}" if path else found["field"]
    allowed = ", ".join(_keys_at(path))
    return f"unknown key `{key}` in the configuration; remove it or use one of: {allowed}"


_SECTIONS: dict[str, type[_Section]] = {
    "": RouterConfig,
    "pool": Pool,
    "listen": Listen,
    "admin": Admin,
    "endpoints": Endpoint,
    "agents": Agent,
    "discovery": Discovery,
    "discovery.kubernetes": KubernetesDiscovery,
    "scoring": Scoring,
    "tokenization": Tokenization,
    "index": Index,
    "timeouts": Timeouts,
    "tenancy": Tenancy,
}


def _keys_at(path: str) -> list[str]:
    section = _SECTIONS.get(path.split("[", maxsplit=1)[0], RouterConfig)
    return [field.encode_name for field in msgspec.structs.fields(section)]


def _check(config: RouterConfig) -> None:
    """What types cannot say: addresses, names that refer to each other, positive numbers."""
    _check_ports(config)
    _check_discovery(config)
    names = [agent.name for agent in config.agents]
    _check_unique("agents[].name", names)
    _check_unique("endpoints[].url", [_address(e.url, "endpoints[].url") for e in config.endpoints or ()])
    for agent in config.agents:
        _address(agent.url, "agents[].url")
    for endpoint in config.endpoints or ():
        if endpoint.agent and endpoint.agent not in names:
            raise ConfigError(
                f"endpoints[].agent of {endpoint.url}: no agent is named `{endpoint.agent}`; "
                f"add it to `agents` or use one of: {', '.join(names) or 'none configured'}"
            )
    for name in ("scoring", "tokenization", "index", "timeouts"):
        _check_positive(name, getattr(config, name))
    if not 0 < config.max_body_bytes <= config.max_bodies_bytes:
        raise ConfigError(
            f"max_body_bytes is {config.max_body_bytes}; use a number above 0 and up to max_bodies_bytes, which is "
            f"{config.max_bodies_bytes}"
        )


def _check_discovery(config: RouterConfig) -> None:
    """Members come from one place."""
    if (config.endpoints is None) == (config.discovery is None):
        raise ConfigError(
            "give exactly one of `endpoints` and `discovery`: the engines are listed, or found by the router"
        )
    if config.discovery is None:
        return
    if config.agents:
        raise ConfigError("`agents` is given besides `discovery`; remove it: agents are found with the engines")
    for key in ("namespace", "name"):
        if not getattr(config.pool, key):
            raise ConfigError(f"pool.{key} is missing; with `discovery` it names the pods to look for")


def _check_ports(config: RouterConfig) -> None:
    ports = [("listen.port", config.listen.port), ("admin.port", config.admin.port)]
    if config.discovery is not None:
        ports.append(("discovery.kubernetes.agent_port", config.discovery.kubernetes.agent_port))
    for key, port in ports:
        if not 0 <= port <= 65535:
            raise ConfigError(f"{key} is {port}; use 1 to 65535, or 0 for a port that the system chooses")


def _check_unique(key: str, values: list[str]) -> None:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ConfigError(f"{key}: {', '.join(twice)} appears more than once; remove the second entry")


def _check_positive(section: str, values: msgspec.Struct) -> None:
    for name, value in msgspec.structs.asdict(values).items():
        if isinstance(value, (int, float)) and not value > 0:
            raise ConfigError(f"{section}.{name} is {value}; use a number above 0")


def _address(url: str, key: str) -> str:
    """`host:port` of an http(s) URL without path; ConfigError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise ConfigError(f"{key} `{url}`: {error}; write http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigError(f"{key} `{url}` is not an address; write http://host:port")
    return join_address(parts.hostname, port or "")


def endpoint_address(endpoint: Endpoint) -> str:
    """The endpoint's name everywhere else: `host:port`."""
    return _address(endpoint.url, "endpoints[].url")


def read_token(path: str, key: str) -> str:
    """The token in a file; ConfigError when it cannot be read or is empty."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} `{path}` cannot be read: {error}; write the token into it") from error
    if not token:
        raise ConfigError(f"{key} `{path}` is empty; write the token into it")
    return token
