"""What is known of each shard: may it be read, may it be written, which server process is it.

Owns the breakers (two per shard: one for the link, one for writes that the server refuses). Invariant: one log line and
one gauge update per change of a breaker, none per failure. Thread-safe; nothing here blocks.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool_agent.valkey_breaker import (
    Breaker,
    BreakerState,
    after_failure,
    after_success,
    begin_probe,
    is_closed,
    is_probe_due,
)
from kvpool_agent.valkey_connection import Failure
from kvpool_agent.valkey_keys import BlockKey
from kvpool_agent.valkey_metrics import ValkeyMetrics
from kvpool_agent.valkey_rights import remedy_of

logger = logging.getLogger(__name__)

OPENS_AT_ONCE = frozenset({Failure.TIMEOUT, Failure.UNAUTHENTICATED, Failure.FORBIDDEN})
UNAUTHENTICATED_FACTOR = 3
"""A refused login is tried again this many times more slowly."""


@dataclass(slots=True)
class _Shard:
    link: Breaker = field(default_factory=Breaker)
    writes: Breaker = field(default_factory=Breaker)
    failure: Failure | None = None
    remedy: str = ""
    write_remedy: str = ""
    run_id: str | None = None
    sample: BlockKey | None = None


class ShardHealth:
    """Health of all shards by name. Shards appear when first mentioned."""

    def __init__(self, *, breaker_failures: int, breaker_open_seconds: float, metrics: ValkeyMetrics) -> None:
        self._threshold = breaker_failures
        self._open_seconds = breaker_open_seconds
        self._metrics = metrics
        self._lock = threading.Lock()
        self._shards: dict[str, _Shard] = {}

    def is_usable(self, name: str) -> bool:
        """Whether traffic may go to a shard."""
        shard = self._shards.get(name)
        return shard is None or is_closed(shard.link)

    def may_write(self, name: str) -> bool:
        """Whether a write may go to a shard now; after refusals one write at a time finds out."""
        with self._lock:
            shard = self._shard(name)
            if not is_closed(shard.link):
                return False
            now = time.monotonic()
            if is_probe_due(shard.writes, now=now):
                shard.writes = begin_probe(shard.writes, now=now, give_up_seconds=self._open_seconds)
                return True
            return is_closed(shard.writes)

    def succeeded(self, name: str) -> None:
        """The shard answered."""
        with self._lock:
            shard = self._shard(name)
            before, shard.link = shard.link, after_success(shard.link)
        if not is_closed(before) and is_closed(shard.link):
            self._metrics.breaker(name, False)
            logger.info("valkey shard=%s breaker=closed", name)

    def failed(self, name: str, failure: Failure, detail: object, *, key: BlockKey | None = None) -> None:
        """An exchange with the shard failed. `key`: what was asked for; a probe will ask for it again."""
        self._metrics.failure(failure.value)
        remedy = remedy_of(str(detail)) if failure is Failure.FORBIDDEN else ""
        with self._lock:
            shard = self._shard(name)
            before = shard.link
            shard.failure, shard.sample, shard.remedy = failure, key or shard.sample, remedy
            shard.link = self._after_failure(shard.link, failure)
        if is_closed(before) and not is_closed(shard.link):
            self._metrics.breaker(name, True)
            detail = remedy or str(detail)
            logger.warning("valkey shard=%s breaker=open reason=%s detail=%r", name, failure.value, detail)

    def write_succeeded(self, name: str) -> None:
        """The shard took a write."""
        with self._lock:
            shard = self._shard(name)
            before, shard.writes = shard.writes, after_success(shard.writes)
        if not is_closed(before) and is_closed(shard.writes):
            logger.info("valkey shard=%s writes=accepted", name)

    def write_refused(self, name: str, failure: Failure, detail: object) -> None:
        """The shard answered a write with an error."""
        self._metrics.failure(failure.value)
        remedy = remedy_of(str(detail)) if failure is Failure.FORBIDDEN else ""
        with self._lock:
            shard = self._shard(name)
            before, shard.writes = shard.writes, self._after_failure(shard.writes, failure)
            shard.write_remedy = remedy
        if is_closed(before) and not is_closed(shard.writes):
            detail = remedy or str(detail)
            logger.warning("valkey shard=%s writes=refused reason=%s detail=%r", name, failure.value, detail)

    def begin_due_probes(self) -> list[tuple[str, BlockKey | None]]:
        """Shards to probe now, each with a key that it should serve if one is known."""
        now = time.monotonic()
        due = []
        with self._lock:
            for name, shard in self._shards.items():
                if is_probe_due(shard.link, now=now):
                    shard.link = begin_probe(shard.link, now=now, give_up_seconds=self._open_seconds)
                    due.append((name, shard.sample))
        return due

    def is_new_process(self, name: str, run_id: str) -> bool:
        """Remember the server process that answers; True when another one answered before: its contents are gone."""
        with self._lock:
            shard = self._shard(name)
            before, shard.run_id = shard.run_id, run_id
        return before is not None and before != run_id

    def keep_only(self, names: Iterable[str]) -> bool:
        """Forget shards that the topology lacks; True when one of them was lost rather than moved away."""
        kept = set(names)
        with self._lock:
            gone = {name: self._shards.pop(name) for name in list(self._shards) if name not in kept}
            for name in kept:
                self._shard(name)
        for name in gone:
            self._metrics.forget_shard(name)
        return any(not is_closed(shard.link) for shard in gone.values())

    def breakers(self) -> dict[str, str]:
        """State of each shard for people: closed, or why not."""
        with self._lock:
            return {name: _describe(shard) for name, shard in sorted(self._shards.items())}

    def failures(self) -> list[Failure | None]:
        """Of each shard: None = usable, else why not."""
        with self._lock:
            return [None if is_closed(s.link) else s.failure or Failure.CONNECTION for s in self._shards.values()]

    def remedies(self) -> list[str]:
        """What to do about rights that the user lacks; each once."""
        with self._lock:
            found = {shard.remedy for shard in self._shards.values() if not is_closed(shard.link)}
            found |= {shard.write_remedy for shard in self._shards.values() if not is_closed(shard.writes)}
        return sorted(found - {""})

    def _shard(self, name: str) -> _Shard:
        if name not in self._shards:
            self._shards[name] = _Shard()
            self._metrics.breaker(name, False)
        return self._shards[name]

    def _after_failure(self, breaker: Breaker, failure: Failure) -> Breaker:
        factor = UNAUTHENTICATED_FACTOR if failure is Failure.UNAUTHENTICATED else 1
        return after_failure(
            breaker,
            now=time.monotonic(),
            threshold=self._threshold,
            at_once=failure in OPENS_AT_ONCE,
            open_seconds=self._open_seconds * factor * random.uniform(1.0, 1.5),
        )


def _describe(shard: _Shard) -> str:
    if shard.link.state is not BreakerState.CLOSED:
        return f"{shard.link.state.value}: {(shard.failure or Failure.CONNECTION).value}"
    return "closed" if is_closed(shard.writes) else "closed, writes refused"
