"""The thread that finds the shards, watches them and brings lost ones back.

Owns connecting, probing and topology refreshes, so that no reader or writer ever waits for them. Invariant: traffic
goes to a shard that failed only after a probe from here succeeded. Logs the tier's state until the shards are found; from
then on it is the breakers' changes that are logged.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from valkey.exceptions import ValkeyClusterException

from kvpool_agent.valkey_connection import Failure, failure_of
from kvpool_agent.valkey_exchange import EXCHANGE_ERRORS, Request
from kvpool_agent.valkey_keys import BlockKey, part_name
from kvpool_agent.valkey_link import ValkeyLink
from kvpool_agent.valkey_rights import remedy_of
from kvpool_agent.valkey_settings import ValkeySettings
from kvpool_agent.valkey_topology import discover

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
CHECK_SECONDS = 3.0
"""Every shard's process is looked at this often: a quiet tier notices a lost shard and a replaced one too."""
REFRESH_SECONDS = 30.0
MIN_REFRESH_SECONDS = 1.0
CONNECT_BACKOFF_SECONDS = (0.2, 5.0)
"""First wait and cap between attempts to find the topology."""
WITHDRAW_SECONDS = 10.0
"""Without a shard in use for so long, nobody shall count on what is there: what is found again is told again."""
UNAUTHENTICATED_BACKOFF_SECONDS = 5.0
"""A refused login is not tried more often: the server logs each."""

PROCESS_REQUESTS: tuple[Request, ...] = ((b"INFO", b"server"), (b"PING",))
"""Both by every look: a right that is missing shall not show only when a shard that failed is to be used again."""


@dataclass(frozen=True, slots=True)
class TierState:
    """`state`: connecting | connected | degraded | unreachable | unauthenticated. `detail`: for people."""

    state: str
    detail: str = ""


def judge(
    *,
    is_found: bool,
    connect_failure: Failure | None,
    shards: Sequence[Failure | None],
    remedies: Sequence[str] = (),
) -> TierState:
    """State of the tier. shards: per shard None when usable, else why not. remedies: for rights that the user lacks."""
    forbidden = f"{Failure.FORBIDDEN.value}: {'; '.join(remedies)}"
    if not is_found:
        if connect_failure is None:
            return TierState("connecting")
        state = "unauthenticated" if connect_failure is Failure.UNAUTHENTICATED else "unreachable"
        return TierState(state, forbidden if remedies else connect_failure.value)
    failed = [failure for failure in shards if failure is not None]
    if not failed:
        return TierState("degraded", forbidden) if remedies else TierState("connected", f"{len(shards)} shards")
    kinds = sorted({failure.value for failure in failed} - ({Failure.FORBIDDEN.value} if remedies else set()))
    detail = f"{len(failed)} of {len(shards)} shards: {', '.join([*kinds, *([forbidden] if remedies else [])])}"
    if len(failed) < len(shards):
        return TierState("degraded", detail)
    return TierState("unauthenticated" if Failure.UNAUTHENTICATED in failed else "unreachable", detail)


@dataclass(slots=True)
class Withdrawal:
    """When to tell that nothing in Valkey may be counted on: once for each time that it is of no use for long.

    `useful_at`: monotonic seconds when it last was.
    """

    useful_at: float
    is_told: bool = False

    def is_due(self, *, is_useful: bool, now: float) -> bool:
        """Whether to tell now."""
        if is_useful:
            self.useful_at, self.is_told = now, False
        elif not self.is_told and now - self.useful_at >= WITHDRAW_SECONDS:
            self.is_told = True
            return True
        return False


class ValkeySupervisor:
    """`on_cleared`: some shard came back empty, or none is of use. `on_shards(count)`: the topology has that many."""

    def __init__(
        self,
        settings: ValkeySettings,
        link: ValkeyLink,
        *,
        on_cleared: Callable[[], None],
        on_shards: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._link = link
        self._health = link.health
        self._on_cleared = on_cleared
        self._on_shards = on_shards
        self._connect_failure: Failure | None = None
        self._connect_remedies: list[str] = []
        self._backoff_seconds = CONNECT_BACKOFF_SECONDS[0]
        self._checked_at = self._refreshed_at = 0.0
        self._withdrawal = Withdrawal(time.monotonic())
        self._is_check_wanted = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="valkey-supervisor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread, waiting at most `seconds`."""
        self._is_stopping = True
        self._link.attention.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def state(self) -> TierState:
        """State of the tier now."""
        return judge(
            is_found=self._link.topology is not None,
            connect_failure=self._connect_failure,
            shards=self._health.failures(),
            remedies=self._health.remedies() if self._link.topology is not None else self._connect_remedies,
        )

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._is_stopping:
            self._link.attention.wait(wait_seconds)
            is_called = self._link.attention.is_set()
            self._link.attention.clear()
            try:
                wait_seconds = self._step(is_called=is_called)
            except Exception:
                logger.exception("valkey supervisor step failed unexpectedly")
                wait_seconds = TICK_SECONDS
            is_useful = self.state().state in ("connected", "degraded")
            self._link.metrics.connected(is_useful)
            if self._withdrawal.is_due(is_useful=is_useful, now=time.monotonic()):
                self._on_cleared()

    def _step(self, *, is_called: bool) -> float:
        """One round; seconds until the next unless called."""
        if self._link.topology is None:
            return self._connect()
        for shard, key in self._health.begin_due_probes():
            self._probe(shard, key)
        self._is_check_wanted = self._is_check_wanted or is_called
        if self._is_due(self._checked_at, TICK_SECONDS if self._is_check_wanted else CHECK_SECONDS):
            self._check_processes()
        is_stale = self._link.topology.is_stale or any(failure is not None for failure in self._health.failures())
        if self._is_due(self._refreshed_at, MIN_REFRESH_SECONDS if is_stale else REFRESH_SECONDS):
            self._refresh()
        return TICK_SECONDS

    @staticmethod
    def _is_due(last_at: float, interval_seconds: float) -> bool:
        return time.monotonic() - last_at >= interval_seconds

    # ------------------------------------------------------------------------------------------------- connecting

    def _connect(self) -> float:
        try:
            topology = discover(self._settings)
        except EXCHANGE_ERRORS as error:
            return self._note_connect_failure(error)
        self._connect_failure = None
        self._backoff_seconds = CONNECT_BACKOFF_SECONDS[0]
        self._refreshed_at = time.monotonic()
        self._health.keep_only(topology.shards())
        self._on_shards(len(topology.shards()))
        self._link.topology = topology
        logger.info("valkey state=connected topology=%s shards=%d", topology.kind, len(topology.shards()))
        return 0.0

    def _note_connect_failure(self, error: BaseException) -> float:
        error = _root(error)
        failure = failure_of(error)
        self._link.metrics.failure(failure.value)
        remedies = [remedy_of(str(error))] if failure is Failure.FORBIDDEN else []
        if (failure, remedies) != (self._connect_failure, self._connect_remedies):
            self._connect_failure, self._connect_remedies = failure, remedies
            detail = "; ".join(remedies) or str(error)
            logger.warning("valkey state=%s reason=%s detail=%r", self.state().state, failure.value, detail)
        if failure is Failure.UNAUTHENTICATED:
            return UNAUTHENTICATED_BACKOFF_SECONDS * random.uniform(1.0, 1.5)
        wait_seconds = self._backoff_seconds * random.uniform(1.0, 1.5)
        self._backoff_seconds = min(self._backoff_seconds * 2, CONNECT_BACKOFF_SECONDS[1])
        return wait_seconds

    # --------------------------------------------------------------------------------------------------- watching

    def _probe(self, shard: str, key: BlockKey | None) -> None:
        """A shard that failed is asked what it will be asked; its success or failure is noted by the link."""
        pool = self._link.topology.pool(shard) if self._link.topology is not None else None
        if pool is not None:
            pool.disconnect(inuse_connections=False)
        requests = list(PROCESS_REQUESTS)
        if key is not None:
            requests.append((b"EXISTS", part_name(self._settings.key_prefix, key, 0)))
        self._ask_process(shard, requests)

    def _check_processes(self) -> None:
        if self._link.topology is None:
            return
        self._checked_at, self._is_check_wanted = time.monotonic(), False
        for shard in self._link.topology.shards():
            if self._health.is_usable(shard):
                self._ask_process(shard, PROCESS_REQUESTS)

    def _ask_process(self, shard: str, requests: Sequence[Request]) -> None:
        for index, reply in self._link.ask(shard, requests, op="probe"):
            if (
                index == 0
                and isinstance(reply, bytes | bytearray)
                and self._health.is_new_process(shard, _run_id(reply))
            ):
                logger.info("valkey shard=%s restarted: what was known of its contents is dropped", shard)
                self._on_cleared()

    def _refresh(self) -> None:
        topology = self._link.topology
        if topology is None:
            return
        self._refreshed_at = time.monotonic()
        try:
            topology.refresh(self._health.is_usable)
        except EXCHANGE_ERRORS as error:
            self._link.metrics.failure(failure_of(_root(error)).value)
            return
        self._on_shards(len(topology.shards()))
        if self._health.keep_only(topology.shards()):
            self._on_cleared()


def _root(error: BaseException) -> BaseException:
    """valkey-py wraps the last node's error when no node of a cluster answers, and what that node says to CLUSTER SLOTS."""
    while True:
        hidden = error.__context__ if isinstance(error, ValkeyClusterException) else None
        if (inner := error.__cause__ or hidden) is None:
            return error
        error = inner


def _run_id(info: bytes | bytearray) -> str:
    for line in info.decode(errors="replace").splitlines():
        if line.startswith("run_id:"):
            return line.removeprefix("run_id:").strip()
    return ""
