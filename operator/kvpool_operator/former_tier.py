"""An external Valkey that a living pool uses no more: who tells of the keys that stay there?

Pure. Invariant: what agents were last told to use is what their configuration file says; of a file that is not understood, or of a
managed Valkey (its keys go with its pods), nothing is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from kvpool_operator import deletion, names, reasons
from kvpool_operator.pool import Pool


def keys_left(pool: Pool, config_map: Mapping[str, Any] | None) -> str:
    """What to tell of keys in a Valkey that the spec names no more; "" when there are none that should have gone.

    config_map: the agents', as it is before the new spec is applied. Nodes of one cluster may be exchanged one by one: as long
    as one endpoint stays, it is the same Valkey.
    """
    former = _former(config_map)
    if former is None or names.FINALIZER not in pool.finalizers:
        return ""
    endpoints, prefix = former
    if pool.external is not None and set(endpoints) & set(pool.external.endpoints) and prefix == names.key_prefix(pool):
        return ""
    why = (
        f"spec.valkey.external named {', '.join(endpoints)} until now: unless that is the Valkey that it names now, wait until "
        f"every agent is replaced ({reasons.ROLLOUT_COMPLETE})"
    )
    return deletion.left(prefix, why)


def _former(config_map: Mapping[str, Any] | None) -> tuple[tuple[str, ...], str] | None:
    try:
        section = yaml.safe_load((config_map or {})["data"]["agent.yaml"])["valkey"]
        if "username" in section:  # an external one's is in a file
            return None
        return tuple(str(one) for one in section["endpoints"]), str(section["key_prefix"])
    except (yaml.YAMLError, KeyError, TypeError):
        return None
