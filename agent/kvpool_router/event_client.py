"""Subscriptions to the agents' event streams.

Invariant: a subscription is either in step (its agent's view is complete and follows every delta) or marked lost; it
never ends by itself, whatever the agent sends or does.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Iterator

import aiohttp
import msgspec

from kvpool_core.errors import ConfigError, FrameError
from kvpool_core.frames import FrameDecoder
from kvpool_core.wire import (
    EventsBegin,
    EventsDelta,
    EventsPart,
    EventsReady,
    StreamMessage,
    TierBlocks,
    decode_stream_message,
)
from kvpool_router.config import Index, read_token
from kvpool_router.discovery import AgentAddress
from kvpool_router.fleet_index import AgentView, FleetIndex
from kvpool_router.logs import fields
from kvpool_router.metrics import RouterMetrics
from kvpool_router.stream_state import StreamBrokenError, StreamOrder

log = logging.getLogger(__name__)

UNREACHABLE = "unreachable"
SILENT = "silent"
ENDED = "ended"
UNDECODABLE = "undecodable"
REFUSED = "refused"

_BLOCKS_PER_TURN = 4_096
"""Blocks applied before requests get a turn: a few milliseconds."""


class AgentSubscription:
    """One agent's stream, subscribed to again whenever it breaks."""

    def __init__(
        self,
        address: AgentAddress,
        *,
        session: aiohttp.ClientSession,
        fleet: FleetIndex,
        settings: Index,
        metrics: RouterMetrics,
        jitter: random.Random,
    ) -> None:
        self._address = address
        self._session = session
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics
        self._jitter = jitter
        self._failures = 0
        self._last_reason = ""
        self.resyncs = 0
        self._in_step = metrics.agent_in_step.labels(address.name)
        self._in_step.set(0)

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        while True:
            reason, message = await self._follow_once()
            self._lost(reason, message)
            await asyncio.sleep(self._backoff_seconds())

    async def _follow_once(self) -> tuple[str, str]:
        """Subscribe and follow until the stream breaks; (reason, message) of the break."""
        stream = _Stream(self._address.name, self._fleet)
        try:
            await self._read(stream)
        except StreamBrokenError as error:
            return error.reason, str(error)
        except ConfigError as error:
            return REFUSED, str(error)
        except FrameError as error:
            return UNDECODABLE, str(error)
        except TimeoutError:
            return SILENT, f"nothing came for {self._settings.silence_seconds} s"
        except (aiohttp.ClientError, OSError) as error:
            return UNREACHABLE if not stream.order.boot_id else ENDED, str(error) or type(error).__name__
        finally:
            stream.abandon()
        return ENDED, "the agent ended the stream"

    async def _read(self, stream: _Stream) -> None:
        token = read_token(self._address.token_file, "agents[].token_file")
        headers = {"Authorization": f"Bearer {token}"}
        silence = self._settings.silence_seconds
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence)
        url = f"{self._address.url.rstrip('/')}/v1/events"
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                raise StreamBrokenError(REFUSED, f"GET /v1/events was answered {response.status}")
            await self._read_frames(response, stream)

    async def _read_frames(self, response: aiohttp.ClientResponse, stream: _Stream) -> None:
        decoder = FrameDecoder()
        async for chunk in response.content.iter_any():
            for body in decoder.feed(chunk):
                if await stream.take(decode_stream_message(body)):
                    self._synced()
        if decoder.pending_bytes:
            raise FrameError(f"the stream ended inside a frame, {decoder.pending_bytes} bytes after its start")

    def _synced(self) -> None:
        self._failures, self._last_reason = 0, ""
        self._in_step.set(1)
        log.info("agent's event stream is in step", extra=fields(agent=self._address.name))

    def _lost(self, reason: str, message: str) -> None:
        self._fleet.lost(self._address.name, now=time.monotonic())
        self._in_step.set(0)
        self._metrics.resyncs.labels(self._address.name, reason).inc()
        self._failures += 1
        self.resyncs += 1
        if reason != self._last_reason:
            self._last_reason = reason
            log.warning(
                "agent's event stream is lost", extra=fields(agent=self._address.name, reason=reason, detail=message)
            )

    def _backoff_seconds(self) -> float:
        longest = self._settings.backoff_min_seconds * 2.0 ** min(self._failures - 1, 16)
        return min(longest, self._settings.backoff_max_seconds) * self._jitter.uniform(0.5, 1.0)


class _Stream:
    """One subscription's progress: checks the order, fills the new view, then follows."""

    def __init__(self, agent: str, fleet: FleetIndex) -> None:
        self._agent = agent
        self._fleet = fleet
        self._view: AgentView | None = None
        self.order = StreamOrder()

    async def take(self, message: StreamMessage) -> bool:
        """Apply a message; True when it completed the snapshot. StreamBrokenError when it may not come now."""
        self.order.check(message)
        match message:
            case EventsBegin():
                self._view = self._fleet.new_view(self._agent, message.boot_id)
            case EventsPart() if self._view is not None:
                await self._fill(self._view, message)
            case EventsReady() if self._view is not None:
                self._fleet.commit(self._agent, self._view, self.order.boot_id)
                self._view = None
                return True
            case EventsDelta():
                await self._change(message)
            case _:
                pass
        return False

    async def _fill(self, view: AgentView, part: EventsPart) -> None:
        for info in part.engines:
            view.put_engine(info)
        for blocks in portions(part.blocks):
            view.store(blocks)
            await asyncio.sleep(0)

    async def _change(self, delta: EventsDelta) -> None:
        """Cleared first, then removed, then stored, so that a delta ends with what is held."""
        if delta.engines:
            self._fleet.put_engines(self._agent, delta.engines)
        for blocks in delta.cleared:
            self._fleet.clear(self._agent, blocks)
        for change, changed in ((self._fleet.remove, delta.removed), (self._fleet.store, delta.stored)):
            for blocks in portions(changed):
                change(self._agent, blocks)
                await asyncio.sleep(0)

    def abandon(self) -> None:
        """Drop what an incomplete snapshot left."""
        if self._view is not None:
            self._view.retire()
            self._view = None


def portions(blocks: Iterable[TierBlocks]) -> Iterator[TierBlocks]:
    """The same blocks, at most `_BLOCKS_PER_TURN` at a time."""
    for item in blocks:
        for start in range(0, len(item.hashes), _BLOCKS_PER_TURN):
            yield msgspec.structs.replace(item, hashes=item.hashes[start : start + _BLOCKS_PER_TURN])
