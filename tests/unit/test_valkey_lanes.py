"""Fair turns between shards."""

from __future__ import annotations

import threading
from collections import Counter, deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool_agent.valkey_lanes import FairQueue, Lanes

WAIT_SECONDS = 10.0


def test_shards_take_turns() -> None:
    queue: FairQueue[int] = FairQueue(per_shard=9, batch_items=1, batch_bytes=1)
    for item in range(3):
        queue.put("a", item, 1)
        queue.put("b", item, 1)
    taken = [queue.take() for _ in range(6)]
    assert taken == [("a", [0]), ("b", [0]), ("a", [1]), ("b", [1]), ("a", [2]), ("b", [2])]


def test_batch_ends_before_it_is_too_large_but_holds_one_item() -> None:
    queue: FairQueue[str] = FairQueue(per_shard=9, batch_items=3, batch_bytes=10)
    for item, weight in (("huge", 50), ("x", 6), ("y", 4), ("z", 1), *((letter, 0) for letter in "klmn")):
        queue.put("a", item, weight)
    batches = []
    while (taken := queue.take()) is not None:
        batches.append(taken[1])
    assert batches == [["huge"], ["x", "y"], ["z", "k", "l"], ["m", "n"]]


def test_busy_shard_leaves_the_others_their_turn() -> None:
    queue: FairQueue[int] = FairQueue(per_shard=1, batch_items=1, batch_bytes=1)
    for item in range(2):
        queue.put("hanging", item, 1)
    queue.put("well", 7, 1)
    assert queue.take() == ("hanging", [0])
    assert queue.take() == ("well", [7])
    assert queue.take() is None
    queue.done("hanging")
    assert queue.take() == ("hanging", [1])


class QueueMachine(RuleBasedStateMachine):
    """Against one deque per shard."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(per_shard=2, batch_items=3, batch_bytes=10)
        self.waiting: dict[str, deque[tuple[int, int]]] = {name: deque() for name in "abc"}
        self.running: Counter[str] = Counter()
        self.next_item = 0

    @rule(shard=st.sampled_from("abc"), weight=st.integers(0, 12))
    def put(self, shard: str, weight: int) -> None:
        self.queue.put(shard, self.next_item, weight)
        self.waiting[shard].append((self.next_item, weight))
        self.next_item += 1

    @rule()
    def take(self) -> None:
        taken = self.queue.take()
        if taken is None:
            assert all(not self.waiting[name] or self.running[name] >= 2 for name in "abc")
            return
        shard, batch = taken
        expected = [self.waiting[shard].popleft() for _ in batch]
        assert batch == [item for item, _ in expected]
        assert 1 <= len(batch) <= 3
        assert len(batch) == 1 or sum(weight for _, weight in expected) <= 10
        self.running[shard] += 1
        assert self.running[shard] <= 2

    @rule(shard=st.sampled_from("abc"))
    def done(self, shard: str) -> None:
        if self.running[shard]:
            self.queue.done(shard)
            self.running[shard] -= 1

    @rule()
    def drain(self) -> None:
        left = self.queue.drain()
        assert sorted(left) == sorted(item for lane in self.waiting.values() for item, _ in lane)
        for lane in self.waiting.values():
            lane.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.items == sum(map(len, self.waiting.values()))
        assert self.queue.bytes == sum(weight for lane in self.waiting.values() for _, weight in lane)
        assert self.queue.running == sum(self.running.values())


TestQueueMachine = QueueMachine.TestCase


def test_hanging_shard_does_not_hold_up_another() -> None:
    release, well = threading.Event(), threading.Event()

    def run(shard: str, batch: list[int]) -> None:
        if shard == "hanging":
            release.wait(WAIT_SECONDS)
        else:
            well.set()

    lanes: Lanes[int] = Lanes("test", threads=2, batch_items=1, batch_bytes=1, run=run)
    lanes.share_between(2)
    lanes.start()
    for item in range(5):
        lanes.put("hanging", item, 1)
    lanes.put("well", 0, 1)
    assert well.wait(WAIT_SECONDS)
    release.set()
    assert lanes.wait_until_idle(WAIT_SECONDS)
    assert lanes.stop(WAIT_SECONDS) == []


def test_put_is_refused_over_the_limit_and_after_stop() -> None:
    lanes: Lanes[str] = Lanes("test", threads=1, batch_items=1, batch_bytes=1, run=lambda _shard, _batch: None)
    assert lanes.put("a", "fits", 10, limit_bytes=10)
    assert not lanes.put("a", "over", 1, limit_bytes=10)
    assert lanes.depth() == (1, 10, 0)
    assert lanes.stop(WAIT_SECONDS) == ["fits"]
    assert not lanes.put("a", "late", 1)


def test_failing_batch_does_not_end_its_thread() -> None:
    done = threading.Event()

    def run(shard: str, batch: list[str]) -> None:
        if batch == ["bad"]:
            raise ValueError("a fault in a batch")
        done.set()

    lanes: Lanes[str] = Lanes("test", threads=1, batch_items=1, batch_bytes=1, run=run)
    lanes.start()
    lanes.put("a", "bad", 1)
    lanes.put("a", "good", 1)
    assert done.wait(WAIT_SECONDS)
    assert lanes.stop(WAIT_SECONDS) == []
