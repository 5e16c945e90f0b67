"""What vLLM loads in an injected engine: the connector where it can run, else one that does nothing and says why.

Invariant: importing this module and making the connector never fails: an exception there would keep the engine from starting.
"""

from __future__ import annotations

import sys
from typing import Any

from kvpool_vllm.inert import InertConnector
from kvpool_vllm.support import find_problem


def _load() -> Any:
    try:
        from vllm.version import __version__

        InertConnector.reason = find_problem(str(__version__), sys.version_info[:2])
        if not InertConnector.reason:
            from kvpool_vllm.connector import KvpoolConnector as Connector

            return Connector
    except Exception as error:  # noqa: BLE001 a vLLM that is not as expected
        InertConnector.reason = f"{type(error).__name__}: {error}"
    return InertConnector


KvpoolConnector = _load()
