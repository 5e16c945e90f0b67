"""kopf: watching and login, nothing else.

Invariant: handlers only poke; kopf writes no annotation, finalizer, Event or peering object, since there are `on.event` handlers
only. Both replicas watch, for as long as they run, whatever goes wrong; what is done about it is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import kopf

from kvpool_operator import names
from kvpool_operator.resources import OWNED_KINDS, RESOURCES
from kvpool_operator.work_queue import backoff_seconds

Poke = Callable[[str, Mapping[str, Any], bool], None]
"""(kind, object, whether it is gone)."""

WATCH_SECONDS = 300
"""A watch is begun anew this often."""
CONNECT_SECONDS = 10
STOP_CHECK_SECONDS = 0.2
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
    """Watch until `stop`; for a thread of its own. `ready` is set once kopf runs.

    kopf gives up as a whole when one kind cannot be watched any more: its CRD was deleted, a right was taken away. It is begun
    anew then; meanwhile pools are looked at by the resync only.
    """
    registry = build_registry(poke)
    failures = 0
    while not stop.is_set():
        began = time.monotonic()
        try:
            asyncio.run(_watch_once(registry, identity=identity, namespaces=namespaces, stop=stop, ready=ready))
        except Exception as error:  # noqa: BLE001 (the top of a loop: whatever ended kopf, watching goes on)
            log.warning("watching ended: begun anew", extra={"data": {"reason": f"{type(error).__name__}: {error}"}})
        failures = 1 if time.monotonic() - began > WATCH_SECONDS else failures + 1
        stop.wait(backoff_seconds(failures, random.random()))


async def _watch_once(
    registry: kopf.OperatorRegistry,
    *,
    identity: str,
    namespaces: tuple[str, ...],
    stop: threading.Event,
    ready: threading.Event,
) -> None:
    stopping = (
        asyncio.Event()
    )  # kopf waits for a threading.Event in a thread, and for that thread when a watch has failed
    following = asyncio.create_task(_follow(stop, stopping))
    try:
        await kopf.operator(
            identity=cast(Any, identity),  # else kopf asks for the user's name, which an arbitrary uid has not
            registry=registry,
            settings=build_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stopping,
            ready_flag=ready,
        )
    finally:
        following.cancel()


async def _follow(stop: threading.Event, stopping: asyncio.Event) -> None:
    while not stop.is_set():  # noqa: ASYNC110 (another thread sets it)
        await asyncio.sleep(STOP_CHECK_SECONDS)
    stopping.set()
