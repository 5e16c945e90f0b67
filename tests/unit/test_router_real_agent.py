"""The router's subscription to a real agent: its snapshot, its deltas, its death and its return."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry

from kvpool_core import wire
from kvpool_core.block_hash import block_hashes, short_hash
from kvpool_core.slot_table import CHECKSUM_VALID
from kvpool_router.config import Index
from kvpool_router.discovery import AgentAddress
from kvpool_router.event_client import AgentSubscription
from kvpool_router.fleet_index import GPU, RAM, FleetIndex
from kvpool_router.metrics import RouterMetrics
from kvpool_router.prefix_index import PrefixIndex, TargetMask, TierBlockCount, count_tiers, runs
from tests.unit.agent_peer import Engine, Node, running_node, wait_for
from tests.unit.router_stubs import until

ENDPOINT = "127.0.0.1:8000"
HASHES = list(block_hashes(range(160), block_size=16, seed="seed"))
SHORT = [short_hash(block) for block in HASHES]
FAST = Index(backoff_min_seconds=0.02, backoff_max_seconds=0.1, stale_seconds=60.0)


@asynccontextmanager
async def _following(node: Node) -> AsyncIterator[FleetIndex]:
    fleet = FleetIndex(PrefixIndex(10_000), ["a"])
    address = AgentAddress("a", f"http://127.0.0.1:{node.port}", str(node.folder / "token"))
    async with aiohttp.ClientSession() as session:
        subscription = AgentSubscription(
            address,
            session=session,
            fleet=fleet,
            settings=FAST,
            metrics=RouterMetrics(CollectorRegistry()),
            jitter=random.Random(1),
        )
        task = asyncio.create_task(subscription.run())
        try:
            await until(lambda: fleet.agent_states()["a"].lost_at is None)
            yield fleet
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _found(fleet: FleetIndex) -> TierBlockCount:
    """What the prompt's blocks count for at the engine."""
    refs = fleet.engines_at(ENDPOINT, "a")
    if not refs:
        return TierBlockCount()
    target = TargetMask(*fleet.holder_masks(refs[0], shared_tiers=True))
    return count_tiers(runs(fleet.index.masks(SHORT), target.any), target)


def _load(fleet: FleetIndex) -> tuple[int, int]:
    """Requests and prompt tokens that the engine has."""
    (ref,) = fleet.engines_at(ENDPOINT, "a")
    return ref.info.requests, ref.info.prompt_tokens


def _count(fleet: FleetIndex, tier: str) -> int:
    return sum(map(fleet.index.count, fleet.agent_states()["a"].view.holders_of(tier)))


def _store(engine: Engine) -> None:
    slot = engine.store(1, HASHES[:8]).slots[-1]
    wait_for(lambda: engine.record(slot).flags & CHECKSUM_VALID, "the checksums")


def test_router_follows_a_real_agent(tmp_path: Path) -> None:
    async def follow(node: Node) -> None:
        async with _following(node) as fleet:
            assert fleet.engines_at(ENDPOINT, "a") == []
            engine = await asyncio.to_thread(Engine, node)
            await until(lambda: fleet.engines_at(ENDPOINT, "a"))
            await asyncio.to_thread(_store, engine)
            engine.scheduler.send(wire.GpuEvents(0, "sssr", [0] * 4, [*SHORT[:3], SHORT[2]]))
            await until(lambda: _found(fleet) == TierBlockCount(gpu=2, ram=6))
            engine.scheduler.send(wire.GpuEvents(0, "cs", [0, 0], [0, SHORT[0]]))
            await until(lambda: _found(fleet) == TierBlockCount(gpu=1, ram=7))
            engine.scheduler.send(wire.EngineLoad(0, 3, 700))
            await until(lambda: _load(fleet) == (3, 700))
            async with _following(node) as late:
                assert _found(late) == TierBlockCount(gpu=1, ram=7)
                assert _load(late) == (3, 700)
            engine.close()
            await until(lambda: fleet.engines_at(ENDPOINT, "a") == [])
            assert _count(fleet, GPU) == 0
            assert _count(fleet, RAM) == 8

    with running_node(tmp_path) as node:
        asyncio.run(follow(node))


def test_router_knows_what_a_restarted_agent_took_over(tmp_path: Path) -> None:
    async def follow(node: Node) -> None:
        async with _following(node) as fleet:
            before = fleet.agent_states()["a"].boot_id
            assert node.agent is not None
            await asyncio.to_thread(node.agent.stop, signal.SIGKILL)
            await until(lambda: fleet.agent_states()["a"].lost_at is not None)
            assert _count(fleet, RAM) == 8
            node.config_path.write_text(node.config_path.read_text().replace("port: 0", f"port: {node.port}"))
            await asyncio.to_thread(node.start_agent)
            await until(lambda: fleet.agent_states()["a"].lost_at is None)
            assert fleet.agent_states()["a"].boot_id != before
            assert _count(fleet, RAM) == 8
            engine = await asyncio.to_thread(Engine, node)
            await until(lambda: _found(fleet) == TierBlockCount(ram=8))
            engine.close()

    with running_node(tmp_path) as node:
        engine = Engine(node)
        _store(engine)
        engine.close()
        asyncio.run(follow(node))
