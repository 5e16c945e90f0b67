"""The agent's configuration file: one YAML document, checked whole at start.

Invariant: a `Config` that exists is complete and valid; what is wrong with a file is a ConfigError naming key and remedy.
"""

from __future__ import annotations

import re
import socket
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from kvpool_agent.quantity import parse_quantity
from kvpool_agent.valkey_settings import ValkeySettings
from kvpool_core.errors import ConfigError

CAPACITY_MIN_BYTES = 64 << 20
"""64 MiB: below it a slab holds too few blocks to be worth a tier."""
CAPACITY_MAX_BYTES = 16 << 40
"""16 TiB: the CRD's upper bound."""
HUGE_PAGE_SIZES = {"": 0, "2Mi": 2 << 20, "1Gi": 1 << 30}
LEASE_SECONDS_MIN = 1.0
"""An engine asks anew for leases that end within half a second, and uses them at its next step."""
SOCKET_PATH_MAX_BYTES = 107
"""What sockaddr_un holds, less the closing zero byte."""

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mapping of the file; keys that are not declared are errors."""


class PoolName(_Section, frozen=True):
    """The KVCachePool that this agent serves."""

    namespace: str
    name: str


class AdminSettings(_Section, frozen=True):
    """Where the admin API listens.

    port: 0 takes a free one and logs it. token_file: the bearer token of `/v1/*`, re-read when the file changes.
    """

    port: int
    token_file: str
    host: str = "127.0.0.1"
    """Loopback: whoever wants the API from outside says so. `*`: every address, IPv4 and IPv6."""


class RamSettings(_Section, frozen=True):
    """The arena. `huge_page_size` "" means 4 KiB pages: the default, since huge pages must be reserved on the node."""

    capacity: str
    huge_page_size: str = ""
    eviction_policy: Literal["LRU"] = "LRU"

    @property
    def capacity_bytes(self) -> int:
        """The arena's size; 0 when `capacity` is not a quantity (refused by `load_config`)."""
        return parse_quantity(self.capacity) or 0

    @property
    def huge_page_bytes(self) -> int:
        """Size of a huge page, 0 for ordinary pages."""
        return HUGE_PAGE_SIZES.get(self.huge_page_size, 0)


class Config(_Section, frozen=True):
    """The whole file."""

    pool: PoolName
    socket_folder: str
    holder_socket: str
    admin: AdminSettings
    ram: RamSettings
    node: str = ""
    """Name of the node. Empty: KVPOOL_NODE of the environment (in a pod from `spec.nodeName`), else the host's name."""
    lease_seconds: float = 10.0
    """Seconds that a lease lasts, 1 at least: longer than a load of the largest prompt and any step of an engine (one that
    lasts as long loads nothing); a dead engine's blocks are soon free."""
    write_lease_seconds: float = 60.0
    """Seconds until a slot whose writer went silent is free again: far above a copy, which takes milliseconds."""
    max_lease_fraction: float = 0.25
    """Share of the arena that one engine may lease, so that four busy engines still leave every one of them something."""
    authentication: Literal["none", "kubernetes"] = "none"
    """`kubernetes`: engines bring a pod-bound token of audience `kvpool.io/<namespace>/<pool>`, checked by TokenReview."""
    allowed_namespaces_file: str = ""
    """Namespaces whose pods may use the pool, one a line, or `*`; read again when it changes. Needed with `kubernetes`."""
    drain_seconds: float = 10.0
    """After SIGTERM: time for blocks that wait to be written to Valkey. A pod's grace period must be longer by 20 s."""
    valkey: ValkeySettings | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @property
    def socket_path(self) -> Path:
        """The agent's Unix socket."""
        return Path(self.socket_folder) / "agent.sock"


def load_config(path: Path, environ: Mapping[str, str]) -> Config:
    """Read and check the file; ConfigError says what to change. environ: gives the node's name when the file does not."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}: give --config a readable file"
        ) from error
    config = parse_config(text)
    node = config.node or environ.get("KVPOOL_NODE", "") or socket.gethostname()
    return msgspec.structs.replace(config, node=node)


def parse_config(text: bytes | str) -> Config:
    """Decode and check a configuration document."""
    config = _decode(text)
    for check in _CHECKS:
        problem = check(config)
        if problem:
            raise ConfigError(problem)
    if config.valkey is None:
        return config
    valkey = config.valkey
    if not valkey.key_prefix:
        prefix = f"kvpool:{config.pool.namespace}/{config.pool.name}:"
        valkey = msgspec.structs.replace(valkey, key_prefix=prefix)
    valkey.validate()
    return msgspec.structs.replace(config, valkey=valkey)


def _decode(text: bytes | str) -> Config:
    try:
        return msgspec.convert(yaml.safe_load(text), type=Config)
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration is not YAML: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from error


def _explain(message: str) -> str:
    """msgspec's message as "key: what is wrong; what is allowed"."""
    problem, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    allowed = _allowed_keys(path)
    unknown = re.match(r"Object contains unknown field `(.*)`", problem)
    if unknown:
        key = f"{path}.{unknown[1]}" if path else unknown[1]
        return f"{key}: unknown key: remove it or use one of: {allowed}"
    missing = re.match(r"Object missing required field `(.*)`", problem)
    if missing:
        key = f"{path}.{missing[1]}" if path else missing[1]
        return f"{key}: required key is missing: add it"
    return f"{path or 'the document'}: {problem}: correct the value"


def _allowed_keys(path: str) -> str:
    """Names of the keys allowed in the mapping at `path` ("" is the document)."""
    kind: object = Config
    for part in filter(None, re.split(r"\.|\[.*?\]", path)):
        fields = {
            field.encode_name: field.type for field in msgspec.structs.fields(typing.cast(type[msgspec.Struct], kind))
        }
        kind = _struct_of(fields.get(part))
        if kind is None:
            return "(none)"
    struct = typing.cast(type[msgspec.Struct], kind)
    return ", ".join(sorted(field.encode_name for field in msgspec.structs.fields(struct)))


def _struct_of(kind: object) -> type[msgspec.Struct] | None:
    for candidate in (kind, *typing.get_args(kind)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def _check_pool(config: Config) -> str:
    for key, value in (("pool.namespace", config.pool.namespace), ("pool.name", config.pool.name)):
        if not _LABEL.fullmatch(value):
            return f"{key}: {value!r} is not a DNS label: use lower-case letters, digits and '-', at most 63"
    return ""


def _check_capacity(config: Config) -> str:
    capacity = parse_quantity(config.ram.capacity)
    if capacity is None:
        return f"ram.capacity: {config.ram.capacity!r} is not a quantity: use a whole number with Mi, Gi or Ti, such as 64Gi"
    if not CAPACITY_MIN_BYTES <= capacity <= CAPACITY_MAX_BYTES:
        return f"ram.capacity: {config.ram.capacity} is out of range: use 64Mi to 16Ti"
    return ""


def _check_huge_pages(config: Config) -> str:
    size = config.ram.huge_page_size
    if size not in HUGE_PAGE_SIZES:
        return f"ram.huge_page_size: {size!r} is not supported: use 2Mi or 1Gi, or remove the key for 4 KiB pages"
    pages = HUGE_PAGE_SIZES[size]
    if pages and config.ram.capacity_bytes % pages:
        return (
            f"ram.huge_page_size: {size} does not divide ram.capacity {config.ram.capacity}: use a multiple of {size}"
        )
    return ""


def _check_ranges(config: Config) -> str:
    ranges = (
        ("lease_seconds", config.lease_seconds, LEASE_SECONDS_MIN, 600.0),
        ("write_lease_seconds", config.write_lease_seconds, 1.0, 3600.0),
        ("max_lease_fraction", config.max_lease_fraction, 0.01, 1.0),
        ("drain_seconds", config.drain_seconds, 0.0, 3600.0),
        ("admin.port", config.admin.port, 0, 65535),
    )
    for key, value, low, high in ranges:
        if not low <= value <= high:
            return f"{key}: {value} is out of range: use {low} to {high}"
    return ""


def _check_sockets(config: Config) -> str:
    for key, path in (("socket_folder", str(config.socket_path)), ("holder_socket", config.holder_socket)):
        if not path.startswith("/"):
            return f"{key}: {path!r} is relative: use an absolute path"
        if len(path.encode()) > SOCKET_PATH_MAX_BYTES:
            return f"{key}: the socket {path} is longer than {SOCKET_PATH_MAX_BYTES} bytes: use a shorter folder"
    return ""


def _check_authentication(config: Config) -> str:
    if config.authentication == "kubernetes" and not config.allowed_namespaces_file.startswith("/"):
        return (
            f"allowed_namespaces_file: {config.allowed_namespaces_file!r} is no absolute path, and authentication is "
            "kubernetes: name the file with the namespaces that may use the pool"
        )
    if config.authentication == "none" and config.allowed_namespaces_file:
        return (
            "allowed_namespaces_file: without authentication no namespace is known: set authentication to kubernetes, "
            "or remove the key"
        )
    return ""


_CHECKS = (_check_pool, _check_capacity, _check_huge_pages, _check_ranges, _check_sockets, _check_authentication)
