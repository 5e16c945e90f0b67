"""What is planned for a managed Valkey in one given situation, and how nodes' replies are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.valkey.commands import Bump, Claim, Forget, Meet, Migrate, Pod, Reset, Stabilize
from kvpool_operator.valkey.meeting import served
from kvpool_operator.valkey.members import SeenPod, Waiting, members_of
from kvpool_operator.valkey.shares import Move, plan_moves, quota, share_out
from kvpool_operator.valkey.slots import ALL, SLOTS, describe, lowest, mask_of, ranges_of
from kvpool_operator.valkey.topology import Plan, plan, replicas_needed
from kvpool_operator.valkey.view import Migration, NodeView, Peer, ValkeyReplyError, normal_host, parse_view

NOW_MS = 1_700_000_000_000
MIB = 1024**2


def pod(ordinal: int, host: str = "") -> Pod:
    return Pod(f"valkey-{ordinal}", ordinal, f"uid-{ordinal}", host or f"10.0.0.{ordinal}")


def peer_of(view: NodeView, at: Pod, *, silent_seconds: int = 0) -> Peer:
    return Peer(view.node_id, at.host, at.port, view.epoch, view.slots, NOW_MS - silent_seconds * 1000)


def cluster(shards: int) -> list[SeenPod]:
    """A settled one."""
    edges = [quota(ordinal, shards) for ordinal in range(shards)]
    views = [
        NodeView(
            f"id-{ordinal}",
            ordinal + 1,
            mask_of([(sum(edges[:ordinal]), sum(edges[: ordinal + 1]) - 1)]),
            (),
            time_ms=NOW_MS,
            uptime_seconds=1000,
        )
        for ordinal in range(shards)
    ]
    return [
        SeenPod(pod(i), replace(view, peers=tuple(peer_of(views[j], pod(j)) for j in range(shards) if j != i)))
        for i, view in enumerate(views)
    ]


def fresh(ordinal: int, *, uptime_seconds: int = 1) -> SeenPod:
    return SeenPod(pod(ordinal), NodeView(f"new-{ordinal}", 0, 0, (), time_ms=NOW_MS, uptime_seconds=uptime_seconds))


def absent(ordinal: int, host: str = "") -> SeenPod:
    return SeenPod(pod(ordinal, host), None, Waiting("ShardUnreachable", f"valkey-{ordinal} does not answer"))


def changed(seen: SeenPod, **fields: object) -> SeenPod:
    assert seen.view is not None
    return replace(seen, view=replace(seen.view, **fields))  # type: ignore[arg-type]


def kinds(planned: Plan) -> list[type]:
    return [type(command) for command in planned.commands]


def reasons(planned: Plan) -> list[str]:
    return [waiting.reason for waiting in planned.waiting]


def silent(seen: SeenPod, node_id: str, seconds: int) -> SeenPod:
    assert seen.view is not None
    peers = [
        replace(peer, pong_ms=NOW_MS - seconds * 1000) if peer.node_id == node_id else peer for peer in seen.view.peers
    ]
    return changed(seen, peers=tuple(peers))


# ------------------------------------------------------------------------------------------------------- situations


@pytest.mark.parametrize("shards", [1, 2, 3, 64])
def test_settled_cluster_gets_an_empty_plan(shards: int) -> None:
    assert plan(cluster(shards), shards) == Plan()


def test_new_cluster_gets_even_shares_and_distinct_epochs_before_anybody_meets() -> None:
    planned = plan([fresh(ordinal) for ordinal in range(3)], 3)
    assert kinds(planned) == [Claim, Claim, Claim, Meet]
    claims = [command for command in planned.commands if isinstance(command, Claim)]
    assert [command.epoch for command in claims] == [1, 2, 3]
    assert [ranges_of(command.slots) for command in claims] == [((0, 5460),), ((5461, 10921),), ((10922, 16383),)]
    assert reasons(planned) == ["ClusterHealing"]


def test_new_cluster_waits_for_its_last_pod_but_not_for_ever() -> None:
    assert plan([fresh(0), absent(1)], 2).commands == ()
    assert reasons(plan([fresh(0), absent(1)], 2)) == ["ShardUnreachable", "ClusterForming"]
    late = plan([fresh(0, uptime_seconds=30), absent(1)], 2)
    assert [command.slots for command in late.commands if isinstance(command, Claim)] == [ALL]


def test_lost_shard_is_forgotten_by_all_before_the_newcomer_takes_its_slots_and_is_met() -> None:
    seen = [*cluster(3)[:2], fresh(2)]
    planned = plan(seen, 3)
    assert kinds(planned) == [Forget, Forget, Claim, Meet]
    assert planned.commands[0] == Forget(pod(0), ("id-2",))
    assert planned.commands[2] == Claim(pod(2), mask_of([(10922, 16383)]), epoch=4)


def test_slots_wait_for_a_container_that_restarts_and_for_a_pod_that_is_made_anew() -> None:
    restarting = plan([*cluster(3)[:2], absent(2)], 3)
    made_anew = plan(cluster(3)[:2], 3)
    new_but_starting = plan([*cluster(3)[:2], absent(2, "10.0.0.99")], 3)
    for planned in (restarting, made_anew, new_but_starting):
        assert planned.commands == ()
        assert reasons(planned)[-1] == "ClusterHealing"
    assert reasons(made_anew)[0] == "ShardMissing"


def test_slots_of_a_node_that_is_silent_for_long_go_to_survivors() -> None:
    seen = [silent(one, "id-2", 30) for one in cluster(3)[:2]]
    planned = plan([*seen, absent(2)], 3)
    assert kinds(planned) == [Forget, Forget, Claim, Claim]
    claims = [command for command in planned.commands if isinstance(command, Claim)]
    assert [command.slots.bit_count() for command in claims] == [2731, 2731]
    assert {command.epoch for command in claims} == {None}
    assert ("CLUSTER", "BUMPEPOCH") in claims[0].wire()


def test_node_that_its_peers_hear_is_not_given_up_because_the_operator_does_not_reach_it() -> None:
    seen = [silent(cluster(3)[0], "id-2", 300), silent(cluster(3)[1], "id-2", 2)]
    assert plan([*seen, absent(2)], 3).commands == ()


def test_replica_is_made_a_primary_again_and_nothing_else_is_asked_of_it() -> None:
    replica = changed(fresh(2), is_replica=True, peers=cluster(3)[0].view.peers)  # type: ignore[union-attr]
    planned = plan([*cluster(3)[:2], replica], 3)
    assert planned.commands[0] == Reset(pod(2))
    assert [command for command in planned.commands if command.pod.ordinal == 2] == [Reset(pod(2))]


def test_new_addresses_are_made_known() -> None:
    seen = [replace(one, pod=replace(one.pod, host=f"10.9.9.{one.pod.ordinal}")) for one in cluster(2)]
    planned = plan(seen, 2)
    assert planned.commands == (Meet(seen[0].pod, (seen[1].pod,)),)


def test_two_clusters_are_joined() -> None:
    alone = [changed(one, peers=()) for one in cluster(2)]
    both = [changed(alone[0], slots=ALL), changed(alone[1], slots=ALL)]
    assert plan(both, 2).commands == (Meet(pod(0), (pod(1),)),)


def test_claim_that_somebody_does_not_believe_is_asserted_by_the_one_with_precedence() -> None:
    one, two = cluster(2)
    assert one.view is not None
    stale = changed(two, slots=ALL, epoch=1, peers=(peer_of(replace(one.view, slots=0), pod(0)),))
    assert plan([one, stale], 2).commands == (Bump(pod(0)),)
    above = changed(one, epoch=7)
    assert reasons(plan([above, changed(stale, peers=(peer_of(replace(one.view, slots=0, epoch=7), pod(0)),))], 2)) == [
        "ClusterSettling"
    ]


def test_slots_on_their_way_while_the_nodes_were_asked_are_looked_at_twice() -> None:
    moved = mask_of([(0, 99)])
    one, two, three = cluster(3)
    assert one.view is not None
    given_away = changed(
        one,
        slots=one.view.slots & ~moved,
        peers=tuple(
            replace(peer, slots=peer.slots | moved) if peer.node_id == "id-1" else peer for peer in one.view.peers
        ),
    )
    first = plan([given_away, two, three], 3)
    assert (first.commands, first.disputed, reasons(first)) == ((), moved, ["ClusterSettling"])
    assert plan([given_away, two, three], 3, confirmed=moved).commands == (Claim(pod(0), moved, released=moved),)
    assert served(members_of([given_away, two, three])) == ALL


def test_slots_left_open_by_hand_are_closed() -> None:
    seen = cluster(2)
    assert plan([changed(seen[0], open_slots=(5, 9)), seen[1]], 2).commands == (Stabilize(pod(0), (5, 9)),)


def test_more_shards_get_slots_with_their_keys() -> None:
    three = cluster(3)
    four = fresh(3)
    assert four.view is not None
    views = [one.view for one in three if one.view is not None]
    peers = tuple(peer_of(view, pod(i)) for i, view in enumerate(views))
    known = [
        changed(one, peers=(*view.peers, peer_of(four.view, pod(3)))) for one, view in zip(three, views, strict=True)
    ]
    planned = plan([*known, changed(four, peers=peers)], 4)
    assert kinds(planned) == [Migrate, Migrate, Migrate]
    assert reasons(planned) == ["SlotsMoving"]
    under_way = [changed(one, exports=(Migration("new-3", "snapshotting"),)) for one in known]
    assert plan([*under_way, changed(four, peers=peers)], 4).commands == ()


def test_fewer_shards_keep_their_pods_until_they_are_empty() -> None:
    seen = cluster(5)
    assert replicas_needed(seen, 2) == 5
    assert kinds(plan(seen, 2)) == [Migrate] * 3
    emptied = [*seen[:4], changed(seen[4], slots=0)]
    assert replicas_needed(emptied, 2) == 4
    assert replicas_needed([*seen[:4], absent(4)], 2) == 5
    assert replicas_needed([absent(ordinal) for ordinal in range(5)], 2) == 5


# -------------------------------------------------------------------------------------------------------- shares


def node(
    node_id: str, slots: int, *, used: int, maxmemory: int = 100 * MIB, exports: tuple[Migration, ...] = ()
) -> NodeView:
    return NodeView(node_id, 1, slots, (), data_bytes=used, used_bytes=used, maxmemory_bytes=maxmemory, exports=exports)


def test_keys_that_find_no_room_stay_behind() -> None:
    views = {0: node("a", lowest(ALL, 8192), used=70 * MIB), 1: node("b", ALL & ~lowest(ALL, 8192), used=50 * MIB)}
    moves = plan_moves(views, 1)
    assert [move.is_lossy for move in moves] == [False, True]
    assert moves[0].slots.bit_count() == 4096
    assert moves[0].slots | moves[1].slots == views[1].slots


def test_slots_whose_migration_failed_twice_go_without_their_keys() -> None:
    failed = Migration("b", "failed")
    for exports, is_lossy in (
        ((failed,), False),
        ((failed, failed), True),
        ((failed, Migration("b", "success"), failed), False),
    ):
        views = {0: node("a", ALL, used=MIB, exports=exports), 1: node("b", 0, used=0)}
        assert plan_moves(views, 2) == [Move(0, 1, lowest(ALL, 8192), is_lossy=is_lossy)]


@given(
    shards=st.integers(1, 12),
    owners=st.lists(st.integers(0, 15), min_size=1, max_size=40),
    present=st.sets(st.integers(0, 15), min_size=1),
)
def test_moves_and_shares_never_lose_or_double_a_slot(shards: int, owners: list[int], present: set[int]) -> None:
    size = SLOTS // len(owners) + 1
    have = dict.fromkeys(sorted(present), 0)
    unowned = ALL
    for index, owner in enumerate(owners):
        if owner in have:
            run = mask_of([(index * size, (index + 1) * size - 1)]) & ALL
            have[owner] |= run
            unowned &= ~run
    given = share_out(unowned, {ordinal: slots.bit_count() for ordinal, slots in have.items()}, shards)
    for ordinal, slots in given.items():
        have[ordinal] |= slots
    assert sum(slots.bit_count() for slots in have.values()) == SLOTS
    for move in plan_moves({ordinal: node(str(ordinal), slots, used=MIB) for ordinal, slots in have.items()}, shards):
        assert move.slots & ~have[move.source] == 0
        have[move.source] &= ~move.slots
        have[move.target] |= move.slots
    assert sum(slots.bit_count() for slots in have.values()) == SLOTS
    if set(range(shards)) <= present:
        assert {ordinal: slots.bit_count() for ordinal, slots in have.items()} == {i: quota(i, shards) for i in present}


@given(st.sets(st.integers(0, SLOTS - 1)), st.integers(0, SLOTS))
def test_masks_and_ranges_say_the_same(slots: set[int], count: int) -> None:
    mask = sum(1 << slot for slot in slots)
    assert mask_of(ranges_of(mask)) == mask
    assert {slot for first, last in ranges_of(mask) for slot in range(first, last + 1)} == slots
    assert ranges_of(lowest(mask, count)) == ranges_of(sum(1 << slot for slot in sorted(slots)[:count]))


def test_many_slots_are_told_briefly() -> None:
    assert describe(mask_of([(0, 2), (5, 5), (7, 8), (10, 10)])) == "7 slots (0-2, 5, 7-8, ...)"
    assert describe(0) == "no slots"


# -------------------------------------------------------------------------------------------------------- replies

NODES = """\
aa 10.0.0.1:6379@16379,host-a myself,master,nofailover - 0 0 3 connected 0-99 200 [300->-bb]
bb fd00::5:6379@16379 master - 0 1700000000000 4 connected 100-199
cc :0@0 slave,fail,noaddr bb 1700000000000 1699999999000 4 disconnected
dd 10.0.0.9:6379@16379 handshake - 1700000000000 0 0 disconnected
"""
INFO = "# Server\r\nuptime_in_seconds:12\r\nused_memory:300\r\nused_memory_dataset:100\r\nmaxmemory:1000\r\n"


def test_replies_become_a_view() -> None:
    jobs = [
        {"operation": "IMPORT", "target_node": "aa", "state": "success"},
        {"operation": "EXPORT", "target_node": "bb", "state": "waiting-to-snapshot"},
    ]
    view = parse_view(nodes=NODES, cluster_info="cluster_state:fail\r\n", info=INFO, migrations=jobs, time_ms=NOW_MS)
    assert (view.node_id, view.epoch, view.is_replica, view.is_ok, view.open_slots) == ("aa", 3, False, False, (300,))
    assert view.slots == mask_of([(0, 99), (200, 200)])
    assert (view.time_ms, view.uptime_seconds, view.used_bytes, view.data_bytes, view.maxmemory_bytes) == (
        NOW_MS, 12, 300, 100, 1000,
    )  # fmt: skip
    assert view.exports == (Migration("bb", "waiting-to-snapshot"),)
    assert [(peer.node_id, peer.host, peer.port, peer.is_handshake) for peer in view.peers] == [
        ("bb", "fd00::5", 6379, False),
        ("cc", "", 0, False),
        ("dd", "10.0.0.9", 6379, True),
    ]
    assert normal_host("fd00:0:0::5") == "fd00::5"


@pytest.mark.parametrize("nodes", ["", "aa", NODES.replace("myself,", ""), NODES.replace("0-99", "0-x")])
def test_replies_that_are_not_understood_are_an_error(nodes: str) -> None:
    with pytest.raises(ValkeyReplyError, match=r"must be Valkey 9\.0 or later"):
        parse_view(nodes=nodes, cluster_info="cluster_state:ok", info=INFO, migrations=[], time_ms=0)
