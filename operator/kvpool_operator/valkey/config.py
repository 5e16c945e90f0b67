"""valkey.conf of the managed Valkey.

Pure. Invariant: `maxmemory` plus what Valkey needs beside its data stays below the container's limit, so that the kernel
never kills a shard for being full. Every line was accepted by 9.1; the reasons were measured (DESIGN section 9).
"""

from __future__ import annotations

from kvpool_core.errors import ConfigError

PORT = 6379
BUS_PORT = 16379
CONFIG_FOLDER = "/etc/kvpool-valkey"
SECRET_FOLDER = "/etc/kvpool-valkey-secret"
DATA_FOLDER = "/data"

MIN_LIMIT_BYTES = 64 * 1024**2
HEADROOM_DIVISOR = 5
MIN_HEADROOM_BYTES = 32 * 1024**2
"""Kept free of the limit: a fifth, for fragmentation, buffers of clients and of slot migration, and pages that the child
which snapshots slots shares no more."""
NODE_TIMEOUT_MS = 5000
"""Silence after which nodes call each other failing. Healing does not wait for it; writes without a majority stop after it."""
BLACKLIST_SECONDS = 5
"""How long a forgotten node stays forgotten. Nodes tell each other whom to forget, so for Valkey's minute one that comes back
could not be taken in (measured). A dead one does not come back by gossip: it would have to answer."""
MAX_IO_THREADS = 8


def maxmemory_bytes(limit_bytes: int) -> int:
    """What Valkey may hold in a container with this memory limit."""
    if limit_bytes < MIN_LIMIT_BYTES:
        raise ConfigError(f"valkey.managed.memoryPerShard is {limit_bytes} bytes; give at least 64Mi")
    return limit_bytes - max(MIN_HEADROOM_BYTES, limit_bytes // HEADROOM_DIVISOR)


def io_threads(cpus: float | None) -> int:
    """Threads for network I/O, the main one included: one CPU is left to the kernel; 1 where no CPU count is given."""
    return 1 if cpus is None else max(1, min(MAX_IO_THREADS, int(cpus) - 1))


def valkey_conf(
    *,
    limit_bytes: int,
    cpus: float | None = None,
    secret_folder: str = SECRET_FOLDER,
    data_folder: str = DATA_FOLDER,
) -> str:
    """The text of valkey.conf.

    limit_bytes: the container's memory limit. cpus: its CPU limit or request. The pod's address comes on the command line
    (`--cluster-announce-ip`), the users and the replication password from files of the Secret.
    """
    return "".join(
        f"{name} {value}\n"
        for name, value in (
            ("bind", "* -::*"),
            ("protected-mode", "no"),  # `default off` protects, also from other pods
            ("port", PORT),
            ("cluster-port", BUS_PORT),
            ("dir", data_folder),
            ("aclfile", f"{secret_folder}/users.acl"),
            ("include", f"{secret_folder}/replication.conf"),
            ("tcp-keepalive", 60),
            ("maxmemory", maxmemory_bytes(limit_bytes)),
            ("maxmemory-policy", "allkeys-lru"),
            ("maxmemory-samples", 64),
            ("io-threads", io_threads(cpus)),
            ("save", '""'),
            ("appendonly", "no"),
            ("cluster-enabled", "yes"),
            ("cluster-config-file", "nodes.conf"),
            ("cluster-node-timeout", NODE_TIMEOUT_MS),
            ("cluster-blacklist-ttl", BLACKLIST_SECONDS),
            ("cluster-require-full-coverage", "no"),
            ("cluster-allow-reads-when-down", "yes"),
            ("cluster-allow-replica-migration", "no"),  # a primary that lost its last slot stays a primary
            ("cluster-replica-no-failover", "yes"),  # a replica is an accident and holds nothing
        )
    )
