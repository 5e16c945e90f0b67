"""kopf: watching and login, nothing else.

Invariant: handlers only poke; kopf writes no annotation, finalizer, Event or peering object, since there are `on.event` handlers
only. Both replicas watch; what is done about it is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import kopf

from kvpool_operator import names
from kvpool_operator.resources import OWNED_KINDS, RESOURCES

Poke = Callable[[str, Mapping[str, Any], bool], None]
"""(kind, object, whether it is gone)."""

WATCH_SECONDS = 300
"""A watch is begun anew this often."""
CONNECT_SECONDS = 10
log = logging.getLogger("kvpool.operator.handlers")

OURS = f"{names.MANAGED_BY_LABEL}={names.FIELD_MANAGER}"
SELECTORS = {
    names.KIND: "",
    "Node": "",
    "Namespace": "",
    "Pod": names.POOL_LABEL,
    "Job": OURS,
    **dict.fromkeys(OWNED_KINDS, OURS),
}
"""What is watched, by label; "" = all of the kind."""


class Patience:
    """Pauses between attempts to reach the API server, without end: a new process would not reach it sooner."""

    def __iter__(self) -> Iterator[float]:
        """Seconds."""
        yield from (1, 1, 2, 3, 5)
        while True:
            yield 8 + 4 * random.random()


def build_settings() -> kopf.OperatorSettings:
    """kopf's settings for watching and nothing else."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + 30
    settings.watching.connect_timeout = CONNECT_SECONDS
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = CONNECT_SECONDS
    settings.networking.error_backoffs = Patience()
    settings.process.ultimate_exiting_timeout = None
    for kind, labels in SELECTORS.items():
        if labels:
            settings.watching.label_selectors[_selector(kind)] = labels
    return settings


def _selector(kind: str) -> tuple[str, str, str]:
    group, _, version = RESOURCES[kind].api_version.rpartition("/")
    return group, version, RESOURCES[kind].plural


def build_registry(poke: Poke) -> kopf.OperatorRegistry:
    """A handler for each kind; the default registry's login."""
    registry = kopf.get_default_registry()
    for kind in SELECTORS:
        kopf.on.event(*_selector(kind), id=f"poke-{kind.lower()}", registry=registry)(_handler(kind, poke))
    return registry


def _handler(kind: str, poke: Poke) -> Callable[..., Any]:
    async def handle(*, event: Mapping[str, Any], **_: Any) -> None:  # async: no thread per event
        poke(kind, event.get("object") or {}, event.get("type") == "DELETED")

    return handle


def watch(
    poke: Poke, *, identity: str, namespaces: tuple[str, ...], stop: threading.Event, ready: threading.Event
) -> None:
    """Watch until `stop`; for a thread of its own. `ready` is set once kopf runs. Raises what ended it otherwise."""
    operator = kopf.operator(
        identity=cast(Any, identity),  # else kopf asks for the user's name, which an arbitrary uid has not
        registry=build_registry(poke),
        settings=build_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )
    asyncio.run(operator)
