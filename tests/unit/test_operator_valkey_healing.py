"""Healing against a model of the cluster bus: whatever happened, in whatever order, and wherever the operator was cut off,
the cluster becomes whole again and then is left alone."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpool_operator.valkey.commands import Pod
from kvpool_operator.valkey.members import SeenPod
from kvpool_operator.valkey.shares import quota
from kvpool_operator.valkey.slots import ALL
from kvpool_operator.valkey.topology import Plan, plan, replicas_needed
from tests.unit.valkey_model import Bus, Node, RefusedError, describe

MAX_SHARDS = 5
ROUNDS = 120
"""More than the 30 s that slots wait for a silent node plus the minute that a forgotten one is banned."""
CUTS = st.integers(0, 12)


class ManagedCluster(RuleBasedStateMachine):
    """The StatefulSet, its pods' folders, the kubelet and the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = Bus()
        self.pods: dict[int, Pod] = {}
        self.folders: dict[str, Node] = {}
        self.shards = 3
        self._numbers = itertools.count(1)

    # -------------------------------------------------------------------------------------------------- Kubernetes

    @initialize(shards=st.integers(1, MAX_SHARDS), is_formed=st.booleans())
    def begin(self, shards: int, is_formed: bool) -> None:
        self.shards = shards
        self._scale(shards)
        if is_formed:
            self._settle()

    @rule(shards=st.integers(1, MAX_SHARDS))
    def change_shards(self, shards: int) -> None:
        self.shards = shards

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), count=st.integers(1, MAX_SHARDS), is_back=st.booleans())
    def replace_pods(self, data: st.DataObject, count: int, is_back: bool) -> None:
        for _ in range(min(count, len(self.pods))):
            self._delete(self._draw(data))
        if is_back:
            self._scale(self.shards)

    @rule()
    def statefulset_makes_lacking_pods(self) -> None:
        self._scale(max([self.shards, *(ordinal + 1 for ordinal in self.pods)]))

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def container_dies(self, data: st.DataObject) -> None:
        self._kill(self._draw(data))

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), is_moved=st.booleans(), is_empty=st.booleans())
    def container_starts(self, data: st.DataObject, is_moved: bool, is_empty: bool) -> None:
        self._start(self._draw(data), is_moved=is_moved, is_empty=is_empty)

    def _draw(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.pods)))

    def _scale(self, replicas: int) -> None:
        for ordinal in range(replicas):
            if ordinal not in self.pods:
                number = next(self._numbers)
                self.pods[ordinal] = Pod(f"pod-{ordinal}", ordinal, f"uid-{number}", f"10.0.0.{number}")
                self._start(ordinal)
        for ordinal in [ordinal for ordinal in self.pods if ordinal >= replicas]:
            self._delete(ordinal)

    def _delete(self, ordinal: int) -> None:
        self._kill(ordinal)
        self.folders.pop(self.pods.pop(ordinal).uid)

    def _kill(self, ordinal: int) -> None:
        if self.pods[ordinal].host in self.bus.running:
            self.folders[self.pods[ordinal].uid] = self.bus.running[self.pods[ordinal].host]
            self.bus.stop(self.pods[ordinal].host)

    def _start(self, ordinal: int, *, is_moved: bool = False, is_empty: bool = False) -> None:
        pod = self.pods[ordinal]
        if pod.host in self.bus.running:
            return
        number = next(self._numbers)
        if is_moved:
            pod = self.pods[ordinal] = Pod(pod.name, ordinal, pod.uid, f"10.0.0.{number}")
        if is_empty or pod.uid not in self.folders:
            self.folders[pod.uid] = Node(f"n{(number * 7919) % 100_000:06}", pod.host)
        self.folders[pod.uid].host = pod.host
        self.bus.start(self.folders[pod.uid])

    # ------------------------------------------------------------------------------------- what goes wrong within

    @precondition(lambda self: len(self.bus.running) > 1)
    @rule(data=st.data())
    def node_becomes_a_replica(self, data: st.DataObject) -> None:
        node = self.bus.running[data.draw(st.sampled_from(sorted(self.bus.running)))]
        if node.peers and not node.slots:
            node.primary = data.draw(st.sampled_from(sorted(node.peers)))

    @precondition(lambda self: len(self.bus.running) > 1)
    @rule(data=st.data())
    def nodes_forget_each_other(self, data: st.DataObject) -> None:
        nodes = list(self.bus.running.values())
        cut = data.draw(st.integers(1, len(nodes) - 1))
        for one, two in itertools.product(nodes[:cut], nodes[cut:]):
            for node, other in ((one, two), (two, one)):
                if node.peers.pop(other.node_id, None) is not None:
                    node.owner.pop(other.node_id, None)

    @precondition(lambda self: self.bus.running)
    @rule(data=st.data(), first=st.integers(0, 16383), length=st.integers(1, 6000))
    def somebody_drops_slots(self, data: st.DataObject, first: int, length: int) -> None:
        node = self.bus.running[data.draw(st.sampled_from(sorted(self.bus.running)))]
        node.give(((1 << length) - 1) << first & ALL, None)

    @rule(seconds=st.sampled_from([1, 1, 2, 5, 35, 70]), migrations_fail=st.booleans())
    def time_passes(self, seconds: int, migrations_fail: bool) -> None:
        for _ in range(seconds):
            self.bus.gossip(migrations_fail=migrations_fail)

    # ------------------------------------------------------------------------------------------------ the operator

    @rule(cut=CUTS)
    def operator_is_cut_off(self, cut: int) -> None:
        self._step(cut)

    @rule()
    def operator_works(self) -> None:
        self._step()
        self.bus.gossip()

    @rule()
    def operator_looks_while_slots_move(self) -> None:
        self._step(moving=True)

    def _look(self, *, moving: bool = False) -> list[SeenPod]:
        """moving: time passes between the first half of the pods and the second."""
        pods = sorted(self.pods.values(), key=lambda pod: pod.uid)
        half = len(pods) // 2
        first = [self.bus.look(pod) for pod in pods[:half]]
        if moving:
            self.bus.gossip()
        return first + [self.bus.look(pod) for pod in pods[half:]]

    def _step(self, cut: int | None = None, *, moving: bool = False) -> Plan:
        seen = self._look(moving=moving)
        planned = plan(seen, self.shards)
        if planned.disputed:
            self.bus.gossip()
            seen = self._look()
            planned = plan(seen, self.shards, confirmed=planned.disputed)
        failed: type | None = None
        for command in planned.commands[:cut]:
            if failed not in (None, type(command)):
                break
            try:
                self.bus.execute(command)
            except RefusedError:
                failed = type(command)
        self._scale(replicas_needed(seen, self.shards))
        return planned

    def _settle(self) -> None:
        plans: list[Plan] = []
        for _ in range(ROUNDS):
            plans.append(self._step(moving=len(plans) % 2 == 0))
            self.bus.gossip()
            if plans[-2:] == [Plan(), Plan()]:
                break
        else:
            raise AssertionError((self.shards, self.pods, plans[-3:], describe(self.bus)))

    def teardown(self) -> None:
        """Everything runs again: the cluster becomes whole, each shard has its quota, and there is nothing left to do."""
        self._scale(max([self.shards, *(ordinal + 1 for ordinal in self.pods)]))
        for ordinal in self.pods:
            self._start(ordinal)
        self._settle()
        claims = {ordinal: self.bus.running[pod.host].slots for ordinal, pod in self.pods.items()}
        assert sorted(claims) == list(range(self.shards))
        assert sum(slots.bit_count() for slots in claims.values()) == ALL.bit_count()
        assert [claims[i].bit_count() for i in range(self.shards)] == [
            quota(i, self.shards) for i in range(self.shards)
        ]
        ids = {node.node_id for node in self.bus.running.values()}
        assert all(set(node.peers) <= ids for node in self.bus.running.values())
        for _ in range(3):
            self.bus.gossip()
            assert plan(self._look(), self.shards) == Plan()


TestManagedCluster = ManagedCluster.TestCase
TestManagedCluster.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
