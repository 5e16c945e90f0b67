"""The managed Valkey with real servers: whatever is killed, the cluster becomes whole and keeps what survivors hold."""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from valkey.cluster import ClusterNode, ValkeyCluster
from valkey.crc import key_slot
from valkey.exceptions import NoPermissionError

from kvpool_operator.purge import main
from kvpool_operator.valkey.shares import quota
from tests.harness.managed_valkey import AGENT_PASSWORD, KEY_PREFIX, TEST_PASSWORD, ManagedValkey
from tests.harness.running_tier import KIB, PREFIX, RunningTier, eventually, new_key
from tests.harness.valkey_cluster import SLOTS, ValkeyServers

pytestmark = pytest.mark.engine

SHARDS = 3
KEYS = 300
SESAME = "sesame"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedValkey]:
    """Whole, with three shards, before and after each test."""
    with ManagedValkey(tmp_path_factory.mktemp("managed") / "pods") as servers:
        yield servers


@pytest.fixture
def pods(shared: ManagedValkey) -> ManagedValkey:
    shared.scale(max(SHARDS, len(shared.pods())))
    shared.heal_until_settled(SHARDS)
    return shared


def cluster_client(pods: ManagedValkey) -> Any:
    first = pods.pods()[0]
    return ValkeyCluster(
        startup_nodes=[ClusterNode(first.host, first.port)],
        username="test",
        password=TEST_PASSWORD,
        socket_timeout=5,
        require_full_coverage=False,
    )


def fill(pods: ManagedValkey) -> None:
    with contextlib.closing(cluster_client(pods)) as client:
        pipeline = client.pipeline()
        for number in range(KEYS):
            pipeline.set(f"{KEY_PREFIX}{number}", b"x" * 1000)
        pipeline.execute()


def kept(pods: ManagedValkey) -> int:
    with contextlib.closing(cluster_client(pods)) as client:
        pipeline = client.pipeline()
        for number in range(KEYS):
            pipeline.exists(f"{KEY_PREFIX}{number}")
        return sum(pipeline.execute())


def node_id(pods: ManagedValkey, ordinal: int) -> str:
    with contextlib.closing(pods.client(ordinal)) as client:
        return str(client.execute_command("CLUSTER MYID").decode())


def keys_of(servers: ValkeyServers) -> int:
    total = 0
    for shard in range(len(servers.ports)):
        with contextlib.closing(servers.client(shard)) as client:
            total += int(client.execute_command("DBSIZE"))
    return total


def slot_counts(pods: ManagedValkey) -> list[int]:
    with contextlib.closing(pods.client(0)) as client:
        nodes = client.execute_command("CLUSTER NODES")
    by_host = {address.split(":")[0]: node for address, node in nodes.items()}
    return [
        sum(int(run[-1]) - int(run[0]) + 1 for run in by_host[pod.host]["slots"]) if pod.host in by_host else -1
        for pod in pods.pods()
    ]


def even(shards: int) -> list[int]:
    return [quota(ordinal, shards) for ordinal in range(shards)]


def heal_until_even(pods: ManagedValkey) -> None:
    """Of nodes that were forgotten alive the others hear for a second more that they are to be forgotten."""
    pods.heal_until(lambda result: not result.waiting and slot_counts(pods) == even(SHARDS), SHARDS)


# ------------------------------------------------------------------------------------------------ forming and healing


def test_new_pods_become_a_cluster_that_is_then_left_alone(pods: ManagedValkey) -> None:
    assert slot_counts(pods) == even(SHARDS)
    result = pods.heal(SHARDS)
    assert (result.ready, result.slots_covered, result.replicas, result.actions, result.waiting) == (
        SHARDS, 16384, SHARDS, (), (),
    )  # fmt: skip


def test_lost_shard_is_made_anew_and_the_others_keep_their_keys(pods: ManagedValkey) -> None:
    fill(pods)
    pods.replace(1)
    started = time.monotonic()
    results = pods.heal_until_settled(SHARDS)
    assert time.monotonic() - started < 20
    assert any("took 5461 slots (5461-10921)" in action for result in results for action in result.actions)
    assert slot_counts(pods) == even(SHARDS)
    assert KEYS * 0.55 < kept(pods) < KEYS * 0.8


def test_killed_container_comes_back_as_the_same_node_also_under_a_new_address(pods: ManagedValkey) -> None:
    before = {line.split()[0] for line in pods.nodes(0).splitlines()}
    pods.kill(0)
    pods.kill(2)
    down = pods.heal(SHARDS)
    assert (down.ready, down.actions) == (1, ())
    assert [waiting.reason for waiting in down.waiting][:2] == ["ShardUnreachable"] * 2
    pods.start(0, new_address=True)
    pods.start(2)
    pods.heal_until_settled(SHARDS)
    assert {line.split()[0] for line in pods.nodes(0).splitlines()} == before
    assert slot_counts(pods) == even(SHARDS)


def test_majority_and_then_all_can_be_lost_at_once(pods: ManagedValkey) -> None:
    fill(pods)
    pods.replace(0, 1)
    pods.heal_until_settled(SHARDS)
    assert KEYS * 0.2 < kept(pods) < KEYS * 0.5
    pods.replace(0, 1, 2)
    pods.heal_until_settled(SHARDS)
    assert slot_counts(pods) == even(SHARDS)
    assert kept(pods) == 0


def test_slots_of_a_silent_node_go_to_survivors_and_come_back(pods: ManagedValkey) -> None:
    pods.kill(1)
    results = pods.heal_until(lambda result: result.slots_covered == 16384, SHARDS, patience_seconds=3)
    assert results[-1].ready == 2
    pods.start(1)
    heal_until_even(pods)


def test_accidental_replica_becomes_a_shard(pods: ManagedValkey) -> None:
    pods.replace(2)
    pods.wait_for_ping(2)
    with contextlib.closing(pods.client(2)) as newcomer, contextlib.closing(pods.client(0)) as survivor:
        survivor.execute_command("CLUSTER MEET", pods.pods()[2].host, pods.port, pods.bus_port)
        primary = node_id(pods, 0)
        eventually(lambda: f"{primary} {pods.pods()[0].host}:{pods.port}" in pods.nodes(2))
        newcomer.execute_command("CLUSTER REPLICATE", primary)
    results = pods.heal_until_settled(SHARDS)
    assert any("made pool-valkey-2 a primary again" in action for result in results for action in result.actions)
    assert slot_counts(pods) == even(SHARDS)


def test_clusters_that_forgot_each_other_are_joined(pods: ManagedValkey) -> None:
    ids = [node_id(pods, ordinal) for ordinal in range(SHARDS)]
    for one, other in ((0, 1), (0, 2), (1, 0), (2, 0)):
        with contextlib.closing(pods.client(one)) as client:
            client.execute_command("CLUSTER FORGET", ids[other])
    heal_until_even(pods)


# --------------------------------------------------------------------------------------------------------- scaling


def test_growing_and_shrinking_keeps_keys_and_coverage(pods: ManagedValkey) -> None:
    fill(pods)
    for shards in (5, 2, SHARDS):
        results = pods.heal_until_settled(shards)
        assert {result.slots_covered for result in results if len(pods.pods()) >= shards} == {16384}
        pods.heal_until_settled(shards)
        assert slot_counts(pods) == even(shards)
        assert kept(pods) == KEYS


def test_wrong_password_is_told_and_changes_nothing(pods: ManagedValkey) -> None:
    result = pods.heal(2, password="not-the-password-0123")
    assert {waiting.reason for waiting in result.waiting} == {"ValkeyUnauthenticated"}
    assert (result.ready, result.replicas, result.actions) == (0, SHARDS, ())


def test_paused_server_does_not_hold_a_step_up(pods: ManagedValkey) -> None:
    pods.pause(1)
    started = time.monotonic()
    result = pods.heal(SHARDS, timeout_seconds=0.5)
    pods.resume(1)
    assert time.monotonic() - started < 5
    assert result.waiting[0].reason == "ShardUnreachable"


# --------------------------------------------------------------------------------------------------------- the users


def test_agents_tier_works_as_the_agent_user_and_may_do_no_more(pods: ManagedValkey, tmp_path: Path) -> None:
    password = tmp_path / "agent-password"
    password.write_text(AGENT_PASSWORD)
    endpoint = f"{pods.pods()[0].host}:{pods.port}"
    assert PREFIX == KEY_PREFIX
    with RunningTier([endpoint], username="agent", password_file=str(password), ttl_seconds=600) as tier:
        tier.until("connected")
        keys = [new_key() for _ in range(20)]
        stored = [tier.store(key, 64 * KIB) for key in keys]
        assert [fetched.payload for fetched in tier.fetch_all([(key, 64 * KIB) for key in keys])] == stored
        assert all(tier.exists(*keys))
        assert tier.tier.stats()["writes_dropped"] == {}
    with contextlib.closing(pods.client(0, user="agent")) as agent:
        for command in ("FLUSHALL", "CONFIG GET *", "CLUSTER NODES", "KEYS *", "ACL WHOAMI", f"GET other:{KEY_PREFIX}"):
            with pytest.raises(NoPermissionError):
                agent.execute_command(*command.split())
    with contextlib.closing(pods.client(0, user="operator")) as operator, pytest.raises(NoPermissionError):
        operator.execute_command("FLUSHALL")


# ---------------------------------------------------------------------------------------------------------- purging

OURS, FOREIGN = 100_000, 1_000


def block_name(number: int) -> bytes:
    return b"%032x:0:{%064x}" % (number % 3, number)


@pytest.fixture(scope="module", params=[True, False], ids=["cluster", "standalone"])
def outside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    folder = tmp_path_factory.mktemp("outside")
    shards = 3 if request.param else 1
    with ValkeyServers(folder=folder, shards=shards, cluster=request.param, password=SESAME) as servers:
        yield servers


def seed(servers: ValkeyServers, keys: list[bytes]) -> None:
    by_shard: dict[int, list[bytes]] = {}
    shards = [servers.shard_of_slot(slot) if servers.cluster else 0 for slot in range(SLOTS)]
    for key in keys:
        by_shard.setdefault(shards[key_slot(key)], []).append(key)
    for shard, owned in by_shard.items():
        with socket.create_connection(("127.0.0.1", servers.ports[shard]), timeout=30) as wire:
            commands = [b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$1\r\nx\r\n" % (len(key), key) for key in owned]
            wire.sendall(b"AUTH %s\r\n" % SESAME.encode())
            for start in range(0, len(commands), 1000):
                wire.sendall(b"".join(commands[start : start + 1000]))
            with wire.makefile("rb") as replies:
                assert replies.read(5 * (1 + len(owned))) == b"+OK\r\n" * (1 + len(owned))


class Purge:
    """The command, in this process."""

    def __init__(self, servers: ValkeyServers, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.servers, self.folder, self._capsys = servers, folder, capsys

    def __call__(self, prefix: str, *more: str, password: str = SESAME) -> tuple[int, dict[str, Any]]:
        secret = self.folder / "password"
        secret.write_text(password + "\n")
        files = ["--password-file", str(secret), "--username-file", str(self.folder / "absent")]
        code = main(["--endpoints", self.servers.endpoints[0], "--prefix", prefix, *files, *more])
        result: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return code, result


@pytest.fixture
def purge(outside: ValkeyServers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Purge:
    return Purge(outside, tmp_path, capsys)


def test_purge_takes_all_of_ours_and_nothing_else(outside: ValkeyServers, purge: Purge) -> None:
    ours = "kvpool:test/mine:"
    seed(outside, [ours.encode() + block_name(number) for number in range(OURS)])
    seed(outside, [b"kvpool:test/mine-too:" + block_name(number) for number in range(FOREIGN)])
    code, refused = purge(ours, password="wrong")
    assert (code, refused["deleted"], refused["complete"]) == (1, 0, False)
    assert "refuses the login" in refused["message"]
    worked = time.process_time()
    assert purge(ours) == (0, {"deleted": OURS, "remaining_estimate": 0, "complete": True})
    assert time.process_time() - worked < 5, "within 20 s, also on a machine that is busy otherwise"
    assert keys_of(outside) == FOREIGN


def test_prefix_that_a_user_chose_is_no_licence_and_no_pattern(outside: ValkeyServers, purge: Purge) -> None:
    seed(outside, [b"t[e]am:" + block_name(number) + b":1" for number in range(20)])
    foreign = [b"t[e]am:session", b"t[e]am:0:{1}", b"team:" + block_name(1), b"t[e]am:" + block_name(1) + b"x"]
    seed(outside, foreign)
    before = keys_of(outside)
    assert purge("t[e]am:")[1]["deleted"] == 20
    assert keys_of(outside) == before - 20


def test_purge_whose_time_is_up_says_about_how_much_is_left(outside: ValkeyServers, purge: Purge) -> None:
    seed(outside, [b"kvpool:test/late:" + block_name(number) for number in range(2000)])
    code, result = purge("kvpool:test/late:", "--deadline-seconds", "0.0001")
    assert (code, result["complete"]) == (3, False)
    assert result["deleted"] + result["remaining_estimate"] >= 1000
    assert "time was up" in result["message"]
