"""What the agents told, joined."""

from __future__ import annotations

import pytest

from kvpool_core.wire import EngineInfo, GroupLayout, TierBlocks
from kvpool_router.fleet_index import AgentView, FleetIndex, routing_group
from kvpool_router.prefix_index import PrefixIndex

DOMAIN = b"d" * 16
FULL = GroupLayout(1, 4096, 64, 0)
WINDOW = GroupLayout(0, 4096, 32, 4)


def engine(
    name: str,
    *,
    groups: list[GroupLayout],
    endpoint: str = "127.0.0.1:1",
    domain: bytes = DOMAIN,
    connected: bool = True,
) -> EngineInfo:
    return EngineInfo(name, endpoint, 0, ["m"], 32, "seed", domain, groups, connected)


def ram(hashes: list[int], *, group: int = 1, tier: str = "ram") -> TierBlocks:
    return TierBlocks(tier, "", DOMAIN, group, hashes)


def fleet() -> FleetIndex:
    return FleetIndex(PrefixIndex(10_000), ["a", "b"])


def fill(view: AgentView, engines: list[EngineInfo], blocks: list[TierBlocks]) -> None:
    for info in engines:
        view.put_engine(info)
    for stored in blocks:
        view.store(stored)


def synced(
    into: FleetIndex, agent: str, engines: list[EngineInfo], blocks: list[TierBlocks], *, boot_id: bytes = b"1"
) -> None:
    view = into.new_view(agent, boot_id)
    fill(view, engines, blocks)
    into.commit(agent, view, boot_id)


def test_lowest_full_attention_group_is_what_routing_looks_at() -> None:
    other = GroupLayout(2, 4096, 32, 0)
    assert routing_group([WINDOW, other, FULL]) == FULL
    assert routing_group([WINDOW]) is None


def test_blocks_of_a_domain_whose_engines_are_not_there_yet_are_kept() -> None:
    """After an agent took its arena over, `ram` is full before any engine has come back."""
    index = fleet()
    synced(index, "a", [], [ram([1, 2]), ram([7, 8, 9], group=0)])
    index.put_engines("a", [engine("e", groups=[WINDOW, FULL])])
    (ref,) = index.engines_at("127.0.0.1:1", "a")
    assert (ref.group, ref.block_tokens) == (1, 64)
    _, holder, _ = index.holder_masks(ref, shared_tiers=True)
    assert index.index.count(holder) == 2
    assert index.index.live_holders == 1


def test_engine_with_windows_only_has_nothing_to_index() -> None:
    index = fleet()
    synced(index, "a", [engine("e", groups=[WINDOW])], [ram([1], group=0)])
    assert len(index.index) == 0


def test_abandoned_snapshot_leaves_the_old_view_and_its_valkey_hints() -> None:
    index = fleet()
    synced(index, "a", [engine("e", groups=[FULL])], [ram([1]), ram([2], tier="valkey")])
    before = index.holder_masks(index.engines_at("127.0.0.1:1", "")[0], shared_tiers=True)
    abandoned = index.new_view("a", b"2")
    fill(abandoned, [], [ram([5]), ram([6], tier="valkey")])
    abandoned.retire()
    assert index.holder_masks(index.engines_at("127.0.0.1:1", "")[0], shared_tiers=True) == before
    assert index.index.live_holders == 2


def test_valkey_hints_survive_any_number_of_agent_restarts() -> None:
    index = fleet()
    synced(index, "a", [], [ram([1], tier="valkey")])
    for number in range(2, 6):
        engines, blocks = [engine("e", groups=[FULL])], [ram([number], tier="valkey")]
        synced(index, "a", engines, blocks, boot_id=bytes([number]))
    *_, valkey = index.holder_masks(index.engines_at("127.0.0.1:1", "")[0], shared_tiers=True)
    assert index.index.masks(range(1, 6)) == [valkey] * 5
    assert index.index.live_holders == 1


def test_new_snapshot_of_the_same_process_replaces_its_valkey_hints() -> None:
    index = fleet()
    synced(index, "a", [engine("e", groups=[FULL])], [ram([1], tier="valkey")])
    synced(index, "a", [engine("e", groups=[FULL])], [ram([2], tier="valkey")])
    *_, valkey = index.holder_masks(index.engines_at("127.0.0.1:1", "")[0], shared_tiers=True)
    assert [bool(mask & valkey) for mask in index.index.masks([1, 2])] == [False, True]


def test_lost_agent_is_dropped_after_its_grace_and_only_once() -> None:
    index = fleet()
    synced(index, "a", [engine("e", groups=[FULL])], [ram([1]), ram([2], tier="valkey")])
    index.lost("a", now=100.0)
    index.lost("a", now=103.0)
    assert index.expire(now=104.0, stale_seconds=5.0) == []
    assert index.in_step()
    assert index.expire(now=105.1, stale_seconds=5.0) == ["a"]
    assert index.expire(now=200.0, stale_seconds=5.0) == []
    assert not index.in_step()
    assert index.engines_at("127.0.0.1:1", "") == []
    assert index.index.live_holders == 1


def test_engine_is_only_believed_from_its_own_nodes_agent() -> None:
    index = fleet()
    synced(index, "b", [engine("e", groups=[FULL])], [])
    assert index.engines_at("127.0.0.1:1", "a") == []
    assert len(index.engines_at("127.0.0.1:1", "b")) == 1
    assert len(index.engines_at("127.0.0.1:1", "")) == 1


def test_engine_on_another_node_that_claims_an_address_hides_nobody(caplog: pytest.LogCaptureFixture) -> None:
    index = fleet()
    synced(index, "a", [engine("honest", groups=[FULL])], [])
    synced(index, "b", [engine("other", groups=[FULL])], [])
    for agent, name in (("a", "honest"), ("b", "other"), ("", "honest")):
        assert [ref.info.engine_id for ref in index.engines_at("127.0.0.1:1", agent)] == [name]
    index.put_engines("b", [engine("other", groups=[FULL])])
    assert [record.message for record in caplog.records if "claim" in record.message] == [
        "several engines claim one address: give each the address where its own API server listens"
    ]


def test_engines_that_are_not_offered_to_routers_claim_nothing(caplog: pytest.LogCaptureFixture) -> None:
    index = fleet()
    for agent in ("a", "b"):
        synced(index, agent, [engine(f"hidden-{agent}", endpoint="", groups=[FULL])], [])
    assert index.engines_at("", "") == []
    assert not caplog.records
