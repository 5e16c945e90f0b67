"""Probing of the endpoints: GET /health, and the models that each serves.

Invariant: every endpoint of the table is probed by one task; a probe never takes longer than its timeout.
"""

from __future__ import annotations

import asyncio
import logging
import random

import aiohttp
import msgspec

from kvpool_router.config import Timeouts
from kvpool_router.endpoints import EndpointState, EndpointTable, ModelCard
from kvpool_router.logs import fields
from kvpool_router.metrics import RouterMetrics

log = logging.getLogger(__name__)


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


_models_decoder = msgspec.json.Decoder(_Models)
_card_decoder = msgspec.json.Decoder(_Card)


def parse_models(body: bytes) -> dict[str, ModelCard]:
    """The models of a /v1/models answer by name; msgspec.MsgspecError when it is none."""
    cards: dict[str, ModelCard] = {}
    for raw in _models_decoder.decode(body).data:
        card = _card_decoder.decode(raw)
        lora = (card.id, card.root) if card.parent and card.root else None
        cards[card.id] = ModelCard(card.id, lora, msgspec.Raw(bytes(raw)))
    return cards


class HealthMonitor:
    """Probes endpoints and keeps the table's states."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        table: EndpointTable,
        settings: Timeouts,
        metrics: RouterMetrics,
        jitter: random.Random,
    ) -> None:
        self._session = session
        self._table = table
        self._settings = settings
        self._metrics = metrics
        self._jitter = jitter

    async def watch(self, endpoint: EndpointState) -> None:
        """Probe an endpoint again and again until cancelled."""
        models_age = 0.0
        while True:
            await self.probe(endpoint)
            if endpoint.up and models_age >= self._settings.models_interval_seconds:
                models_age = 0.0
                await self.refresh_models(endpoint)
            pause = self._settings.probe_interval_seconds * self._jitter.uniform(0.8, 1.2)
            models_age += pause
            await asyncio.sleep(pause)

    async def probe(self, endpoint: EndpointState) -> bool:
        """Ask once; True when the endpoint is well."""
        try:
            async with asyncio.timeout(self._settings.probe_seconds):
                problem = await self._ask_health(endpoint)
        except TimeoutError:
            if self._table.mark_unanswered(endpoint, "no answer to GET /health in time"):
                self._log(endpoint, "endpoint is silent")
            return False
        except (aiohttp.ClientError, OSError) as error:
            self.mark_down(endpoint, f"GET /health: {error}")
            return False
        if problem:
            self.mark_down(endpoint, problem)
            return False
        await self._mark_up(endpoint)
        return True

    def mark_down(self, endpoint: EndpointState, problem: str) -> None:
        """The endpoint refused a connection, or says that it is not well."""
        if self._table.mark_down(endpoint, problem):
            self._log(endpoint, "endpoint is down")
        self._show(endpoint)

    async def refresh_models(self, endpoint: EndpointState) -> None:
        """Ask for the endpoint's models; what it said last stays when it does not answer."""
        authorization = f"Bearer {endpoint.spec.api_key}" if endpoint.spec.api_key else None
        _, models = await self.ask_models(endpoint, authorization)
        if models is not None:
            endpoint.models = models

    async def ask_models(
        self, endpoint: EndpointState, authorization: str | None
    ) -> tuple[int, dict[str, ModelCard] | None]:
        """Status and models of the endpoint's answer; (0, None) when there was none that is one."""
        headers = {"Authorization": authorization} if authorization else {}
        url = f"{endpoint.spec.url}/v1/models"
        try:
            async with asyncio.timeout(self._settings.probe_seconds), self._session.get(url, headers=headers) as reply:
                return reply.status, parse_models(await reply.read()) if reply.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            log.debug("models not read", extra=fields(endpoint=endpoint.address, detail=str(error)))
            return 0, None

    async def _ask_health(self, endpoint: EndpointState) -> str:
        """What is wrong by the endpoint's own account, "" when nothing."""
        async with self._session.get(f"{endpoint.spec.url}/health") as response:
            await response.read()
            return "" if response.status == 200 else f"GET /health was answered {response.status}"

    async def _mark_up(self, endpoint: EndpointState) -> None:
        """A restarted engine may serve other models: they are asked for before it gets requests."""
        if not endpoint.up:
            await self.refresh_models(endpoint)
        if self._table.get(endpoint.address) is endpoint and self._table.mark_up(endpoint):
            log.info("endpoint is up", extra=fields(endpoint=endpoint.address))
        self._show(endpoint)

    def _show(self, endpoint: EndpointState) -> None:
        """A request in flight may still learn of an endpoint that is gone: its metric stays gone."""
        if self._table.get(endpoint.address) is endpoint:
            self._metrics.endpoint_up.labels(endpoint.address).set(endpoint.up)
            self._metrics.endpoint_silent.labels(endpoint.address).set(endpoint.silent)

    def _log(self, endpoint: EndpointState, message: str) -> None:
        self._show(endpoint)
        log.warning(message, extra=fields(endpoint=endpoint.address, detail=endpoint.problem))
