"""A connector that does nothing, for a vLLM whose connector interface is not the one that kvpool knows.

Invariant: it needs nothing of vLLM but the base class, and answers hooks that it does not know with None.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

logger = logging.getLogger("vllm.kvpool")

BASE_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def _base(name: str) -> Any:
    """vLLM's class of that name; an empty one where this vLLM has none."""
    try:
        return getattr(importlib.import_module(BASE_MODULE), name)
    except Exception:  # noqa: BLE001 whatever importing another vLLM raises
        return type(name, (), {})


_MetadataBase: Any = _base("KVConnectorMetadata")
_ConnectorBase: Any = _base("KVConnectorBase_V1")
_HybridBase: Any = _base("SupportsHMA")


class InertMetadata(_MetadataBase):
    """Nothing to do in this step."""


class InertConnector(_ConnectorBase, _HybridBase):
    """Loads nothing, stores nothing."""

    reason = ""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        logger.error("kvpool: inert, serving without the cache: %s", self.reason)
        for arguments in ((vllm_config, role, kv_cache_config), (vllm_config, role), ()):
            try:
                super().__init__(*arguments)
            except TypeError:
                continue
            break

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed off."""
        return False

    def get_num_new_matched_tokens(self, *_args: Any, **_kwargs: Any) -> tuple[int, bool]:
        """No tokens can be loaded."""
        return 0, False

    def build_connector_meta(self, *_args: Any, **_kwargs: Any) -> InertMetadata:
        """No jobs."""
        return InertMetadata()

    def request_finished(self, *_args: Any, **_kwargs: Any) -> tuple[bool, None]:
        """Blocks may be freed at once."""
        return False, None

    def request_finished_all_groups(self, *_args: Any, **_kwargs: Any) -> tuple[bool, None]:
        """Blocks may be freed at once."""
        return False, None


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


for _name in getattr(InertConnector, "__abstractmethods__", ()):
    setattr(InertConnector, _name, _nothing)
InertConnector.__abstractmethods__ = (
    frozenset()
)  # the base cannot be changed so later: its methods are all answered now
