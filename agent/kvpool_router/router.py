"""The router as a whole: its parts, and the tasks that keep them current.

Invariant: every task has a name and ends with `stop`; whatever one agent or endpoint does, the tasks of others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
from prometheus_client import CollectorRegistry

from kvpool_router.body_room import BodyRoom
from kvpool_router.config import RouterConfig
from kvpool_router.discovery import AgentAddress, Members, MemberSource
from kvpool_router.endpoints import EndpointState, EndpointTable
from kvpool_router.event_client import AgentSubscription
from kvpool_router.fleet_index import FleetIndex
from kvpool_router.health import HealthMonitor
from kvpool_router.load import LoadBook
from kvpool_router.logs import fields
from kvpool_router.metrics import RouterMetrics
from kvpool_router.picker import Picker
from kvpool_router.prefix_index import PrefixIndex
from kvpool_router.proxy import ProxyParts
from kvpool_router.speculative import SpeculativeBlocks
from kvpool_router.tokens import TokenSource

log = logging.getLogger(__name__)

_KEEPALIVE_SECONDS = 3.0
"""Idle connections are dropped earlier than uvicorn in vLLM drops them (5 s), so that no request meets a closed one."""
_TIDY_SECONDS = 0.01
"""Between two shards of a sweep: a whole round takes about 3 s."""
_IDLE_SECONDS = 0.5
_AFTER_BUG_SECONDS = 1.0
START_SECONDS = 5.0
"""An API server that answers does so sooner; while it is away, probes of the router itself must be answered."""


class Router:
    """Owns all parts; `start` inside a running loop, `stop` before it ends."""

    def __init__(self, config: RouterConfig, source: MemberSource, *, registry: CollectorRegistry) -> None:
        self.config = config
        self.metrics = RouterMetrics(registry)
        self.table = EndpointTable(config.timeouts.probe_failures)
        self.fleet = FleetIndex(PrefixIndex(config.index.max_entries), [])
        self.speculative = SpeculativeBlocks(config.index.speculative_seconds)
        self.book = LoadBook(config.scoring.recent_half_life_seconds)
        self.bodies = BodyRoom(config.max_bodies_bytes)
        self.draining = False
        self._source = source
        self._jitter = random.Random()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._agents: dict[str, AgentAddress] = {}
        self._evicted_seen = 0
        self._members_known = asyncio.Event()

    async def start(self) -> None:
        """Open the connection pool, learn who there is and subscribe to the agents, probe each endpoint once.

        Who there is may take longer to learn than START_SECONDS: the router then starts without anybody.
        """
        timeouts = self.config.timeouts
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=timeouts.connect_seconds, sock_read=timeouts.idle_seconds
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self.health = HealthMonitor(
            session=self.session, table=self.table, settings=timeouts, metrics=self.metrics, jitter=self._jitter
        )
        self.picker = Picker(
            config=self.config,
            table=self.table,
            fleet=self.fleet,
            book=self.book,
            tokens=TokenSource(self.session, self.config.tokenization),
            speculative=self.speculative,
        )
        self._spawn("members", self._follow_members)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._members_known.wait(), START_SECONDS)
        await asyncio.gather(*(self.health.probe(endpoint) for endpoint in self.table.all()))
        self._spawn("index-upkeep", self._keep_index)

    async def stop(self) -> None:
        """End all tasks and connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.bodies.close()
        await self.session.close()

    def proxy_parts(self) -> ProxyParts:
        """What the proxy needs of the router."""
        return ProxyParts(
            config=self.config,
            session=self.session,
            table=self.table,
            health=self.health,
            picker=self.picker,
            book=self.book,
            bodies=self.bodies,
            metrics=self.metrics,
        )

    def not_ready(self) -> str:
        """Why no traffic should come here, "" when it should.

        On Kubernetes a pool's engines may come later than its routers: until then 503 with Retry-After is the answer.
        """
        if self.draining:
            return "draining"
        if self.config.discovery is not None:
            return "" if self._members_known.is_set() else "the pool's pods are not known yet"
        return "" if self.table.any_usable() else "no endpoint is up"

    def refresh_gauges(self) -> None:
        """Bring the gauges that are read on demand up to date."""
        index = self.fleet.index
        self.metrics.index_entries.set(len(index))
        self.metrics.index_evicted.inc(index.evicted - self._evicted_seen)
        self._evicted_seen = index.evicted
        now = time.monotonic()
        for gauge in (self.metrics.queued_tokens, self.metrics.running_requests, self.metrics.prefill_rate):
            gauge.clear()
        for target in self.book.targets():
            self.metrics.queued_tokens.labels(target).set(self.book.queued_tokens(target, now=now))
            self.metrics.running_requests.labels(target).set(self.book.running(target))
            self.metrics.prefill_rate.labels(target).set(self.book.tokens_per_second(target))

    # --- tasks --------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks[name] = asyncio.create_task(_again_and_again(name, work), name=name)

    def _subscription(self, address: AgentAddress) -> AgentSubscription:
        return AgentSubscription(
            address,
            session=self.session,
            fleet=self.fleet,
            settings=self.config.index,
            metrics=self.metrics,
            jitter=self._jitter,
        )

    async def _follow_members(self) -> None:
        async for members in self._source.watch(self.metrics):
            self._take_agents(members)
            new, gone = self.table.replace(members.endpoints)
            for endpoint in gone:
                self._drop(endpoint)
            for endpoint in new:
                self._spawn(f"endpoint {endpoint.address}", partial(self.health.watch, endpoint))
            self._members_known.set()
            log.info("members changed", extra=fields(new=len(new), gone=len(gone), agents=len(members.agents)))

    def _take_agents(self, members: Members) -> None:
        """Subscribe to those that are new or moved; one that moved keeps what is known of it until it is in step again."""
        wanted = {agent.name: agent for agent in members.agents}
        for name, agent in list(self._agents.items()):
            if wanted.get(name) != agent:
                self._unsubscribe(name, moved=name in wanted)
        for name, agent in wanted.items():
            if name not in self._agents:
                self._agents[name] = agent
                self.fleet.add_agent(name)
                self._spawn(f"agent {name}", self._subscription(agent).run)

    def _unsubscribe(self, name: str, *, moved: bool) -> None:
        del self._agents[name]
        self._tasks.pop(f"agent {name}").cancel()
        if moved:
            self.fleet.lost(name, now=time.monotonic())
            return
        self.fleet.remove_agent(name)
        for metric in (self.metrics.agent_in_step, self.metrics.resyncs):
            metric.remove_by_labels({"agent": name})

    def _drop(self, endpoint: EndpointState) -> None:
        task = self._tasks.pop(f"endpoint {endpoint.address}", None)
        if task is not None:
            task.cancel()
        self.picker.forget(endpoint)
        for metric in (self.metrics.endpoint_up, self.metrics.endpoint_silent):
            metric.remove_by_labels({"endpoint": endpoint.address})

    async def _keep_index(self) -> None:
        """Drop what lost agents told, and clean the index of retired holders."""
        while True:
            for agent in self.fleet.expire(now=time.monotonic(), stale_seconds=self.config.index.stale_seconds):
                log.warning("agent is gone: its entries were dropped", extra=fields(agent=agent))
            self.fleet.index.sweep()
            await asyncio.sleep(_TIDY_SECONDS if self.fleet.index.needs_sweep else _IDLE_SECONDS)


async def _again_and_again(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a task's work; begin anew after an error that it did not expect, so that one bug does not blind the router."""
    while True:
        try:
            await work()
            return
        except Exception:
            log.exception("task failed and begins anew", extra=fields(task=name))
            await asyncio.sleep(_AFTER_BUG_SECONDS)
