"""Users of the managed Valkey: what each may do.

Pure. Invariant: nobody without a password may do anything (`default off`), and no password stands in the ACL file, only
its SHA-256. The file with the plain replication password is for the server itself and belongs in a Secret.
"""

from __future__ import annotations

import hashlib
import re

from kvpool_core.errors import ConfigError

OPERATOR, AGENT, REPLICATION = "operator", "agent", "replication"
EXTERNAL_RIGHTS = "+@read +@write +@connection +cluster +info"
"""What the user of an external Valkey needs on the pool's keys, for agents and for the purge."""
_PASSWORD = re.compile(r"[A-Za-z0-9_-]{16,256}")
"""What we generate; nothing that would need quoting in Valkey's files."""
_GLOB = re.compile(r"([\\*?\[\]^])")

OPERATOR_RULES = "+ping +info +time +cluster +client|setinfo"
"""Looking at the nodes and forming them; keys go with the pods, so none is touched."""
AGENT_RULES = "+get +set +exists +expire +unlink +ping +info +asking +cluster|slots +client|setinfo"
"""What the agent's tier sends (valkey_reader, valkey_writer, valkey_supervisor, valkey-py's NodesManager)."""
REPLICATION_RULES = "+psync +replconf +ping +select +@write +cluster|syncslots"
"""Slot migration logs in at the target and replays writes there: with a replica's rights alone it fails (measured on 9.1.2)."""


def users_acl(*, operator_password: str, agent_password: str, replication_password: str, key_prefix: str) -> str:
    """The text of `users.acl`. key_prefix: the agents' keys start with it and nothing else may be touched by them."""
    pattern = escape_glob(key_prefix) + "*"
    return "".join(
        (
            "user default off\n",
            f"user {OPERATOR} on {_hash(operator_password)} {OPERATOR_RULES}\n",
            f"user {AGENT} on {_hash(agent_password)} ~{pattern} {AGENT_RULES}\n",
            f"user {REPLICATION} on {_hash(replication_password)} ~* {REPLICATION_RULES}\n",
        )
    )


def acl_rules() -> str:
    """What this release lets users do: shards read it only when they start, so other rules want other shards."""
    return "\n".join((OPERATOR_RULES, AGENT_RULES, REPLICATION_RULES))


def replication_conf(replication_password: str) -> str:
    """The text of `replication.conf`, included by valkey.conf: how a node logs in at another one to migrate slots."""
    _check(replication_password)
    return f"primaryuser {REPLICATION}\nprimaryauth {replication_password}\n"


def escape_glob(text: str) -> str:
    """A Valkey pattern that matches exactly `text`."""
    return _GLOB.sub(r"\\\1", text)


def _hash(password: str) -> str:
    _check(password)
    return "#" + hashlib.sha256(password.encode()).hexdigest()


def _check(password: str) -> None:
    if not _PASSWORD.fullmatch(password):
        raise ConfigError(
            "a generated Valkey password is shorter than 16 or has a character outside A-Z a-z 0-9 _ -; "
            "delete the pool's master Secret in the operator's namespace to have it generated anew"
        )
