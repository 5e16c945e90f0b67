"""Generated Secrets: a master copy with the operator, copies in the pool's namespace.

Invariant: what was generated for a pool (by uid) never changes as long as its master copy exists; copies are written, never read.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.pool import Pool
from kvpool_operator.valkey.acl import replication_conf, users_acl

PASSWORD_BYTES = 32


def new_password() -> str:
    """A password of letters, digits, '-' and '_'."""
    return secrets.token_urlsafe(PASSWORD_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The secrets of one pool."""

    token: str
    operator_password: str
    agent_password: str
    replication_password: str

    def __repr__(self) -> str:
        """Nothing of it: a secret in a log line is none."""
        return "Generated(...)"


def generate(former: Mapping[str, str], make: Callable[[], str] = new_password) -> Generated:
    """What the master copy holds (key to text), completed where it lacks something."""
    return Generated(
        token=former.get("token") or make(),
        operator_password=former.get("operator-password") or make(),
        agent_password=former.get("agent-password") or make(),
        replication_password=former.get("replication-password") or make(),
    )


def decode(data: Mapping[str, str] | None) -> dict[str, str]:
    """Key to text of a Secret's `data`; what is not base64 of UTF-8 is left out."""
    texts: dict[str, str] = {}
    for key, value in (data or {}).items():
        try:
            texts[key] = base64.b64decode(value, validate=True).decode()
        except ValueError:
            continue
    return texts


def build_master(pool: Pool, generated: Generated, *, namespace: str) -> Manifest:
    """The operator's own copy."""
    data = {
        "token": generated.token,
        "operator-password": generated.operator_password,
        "agent-password": generated.agent_password,
        "replication-password": generated.replication_password,
    }
    metadata = {
        "name": names.master_name(pool.uid),
        "namespace": namespace,
        "labels": names.labels(pool, "secrets"),
    }
    return _secret(metadata, data)


def build_token(pool: Pool, generated: Generated) -> Manifest:
    """The bearer token of agents and routers."""
    return _secret(names.metadata(pool, names.token_name(pool), names.AGENT), {"token": generated.token})


def build_valkey(pool: Pool, generated: Generated) -> Manifest | None:
    """What the managed Valkey and its clients read. The operator's own password stays with the operator."""
    if pool.managed is None:
        return None
    data = {
        "agent-password": generated.agent_password,
        "users.acl": users_acl(
            operator_password=generated.operator_password,
            agent_password=generated.agent_password,
            replication_password=generated.replication_password,
            key_prefix=names.key_prefix(pool),
        ),
        "replication.conf": replication_conf(generated.replication_password),
    }
    return _secret(names.metadata(pool, names.valkey_name(pool), names.VALKEY), data)


def _secret(metadata: Manifest, texts: Mapping[str, str]) -> Manifest:
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
