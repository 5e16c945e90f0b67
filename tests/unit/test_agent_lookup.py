"""A lookup that nobody waits for any more: what is still on its way must not lease anything."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kvpool_agent.checksums import Checksums
from kvpool_agent.hints import ValkeyHints
from kvpool_agent.lookup import Lookup, LookupServices
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.slot import Slot
from kvpool_agent.slot_store import SlotStore
from kvpool_core.wire import GroupKeys, GroupLayout, Prefetch, StoreKey, Verdict
from tests.unit.test_slot_store import DOMAIN, SIZES, Watch, block_hash, build, new_table

ENGINE, REQUEST = "engine-a", "1"


@pytest.fixture
def store() -> SlotStore:
    return build(new_table(), Watch())


def arrived_block(store: SlotStore) -> Slot:
    """A block that was fetched."""
    slot = store.begin_fetch(DOMAIN, StoreKey(0, block_hash(1), b"", 0), SIZES[0])
    assert slot is not None
    store.end_fetch(slot, 1)
    return slot


def lookup_of(store: SlotStore, answers: list[Verdict]) -> Lookup:
    services = LookupServices(
        store=store,
        checksums=cast(Checksums, None),  # nothing is unverified here
        fetches=None,
        hints=ValkeyHints(),
        metrics=AgentMetrics(CollectorRegistry()),
        lease_ns=10**9,
        lease_limit_bytes=1 << 30,
    )
    message = Prefetch(1, REQUEST, DOMAIN, False, [GroupKeys(0, [block_hash(1)], 0)], 0.0)
    return Lookup(services, ENGINE, message, {0: GroupLayout(0, SIZES[0], 16, 0)}, answers.append)


@pytest.mark.parametrize("closed", [False, True])
def test_block_that_arrives_after_the_release_is_not_leased(store: SlotStore, closed: bool) -> None:
    lookup = lookup_of(store, [])
    slot = arrived_block(store)
    if closed:
        lookup.close()
    lookup._heard(slot, True)
    assert store.leases.requests_of(ENGINE) == ([] if closed else [REQUEST])


@pytest.mark.parametrize("closed", [False, True])
def test_lookup_whose_last_step_runs_after_the_release_answers_nothing(store: SlotStore, closed: bool) -> None:
    answers: list[Verdict] = []
    lookup = lookup_of(store, answers)
    arrived_block(store)
    if closed:
        lookup.close()
    asyncio.run(lookup.finish())
    assert [answer.final for answer in answers] == ([] if closed else [True])
    assert store.leases.requests_of(ENGINE) == ([] if closed else [REQUEST])
