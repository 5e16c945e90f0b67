"""The event stream: what a reader that applies it knows is what is there."""

from __future__ import annotations

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvpool_agent.event_feed import EventFeed
from kvpool_agent.events import QUEUE_MAX_BYTES, EventHub, Scope, Subscriber
from kvpool_agent.gpu_blocks import GpuBlocks
from kvpool_agent.hints import ValkeyHints
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.valkey_tier import BlockKey
from kvpool_core import wire
from kvpool_core.block_hash import short_hash
from kvpool_core.frames import FrameDecoder
from kvpool_router.fleet_index import FleetIndex
from kvpool_router.prefix_index import PrefixIndex

BOOT_ID = b"b" * 16
SCOPES: list[Scope] = [("ram", "", b"d" * 16, 0), ("valkey", "", b"d" * 16, 0), ("gpu", "engine", b"", 1)]


class Reader:
    """Applies a stream as a router does."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._decoder = FrameDecoder()
        self.present: set[tuple[Scope, int]] = set()
        self.seq = 0
        self.ready = False

    async def catch_up(self) -> None:
        while frame := await self._subscriber.next(0):
            for body in self._decoder.feed(frame):
                self._apply(wire.decode_stream_message(body))

    def _apply(self, message: wire.StreamMessage) -> None:
        match message:
            case wire.EventsBegin(seq=seq):
                self.seq = seq
            case wire.EventsPart(blocks=blocks):
                self.present |= {entry for block in blocks for entry in _entries(block)}
            case wire.EventsReady():
                self.ready = True
            case wire.EventsDelta():
                assert message.seq == self.seq + 1
                self.seq = message.seq
                for block in message.cleared:
                    self.present = {entry for entry in self.present if entry[0] != _scope(block)}
                for block in message.removed:
                    self.present -= set(_entries(block))
                for block in message.stored:
                    self.present |= set(_entries(block))


def _scope(block: wire.TierBlocks) -> Scope:
    return block.tier, block.engine_id, block.domain, block.group


def _entries(block: wire.TierBlocks) -> list[tuple[Scope, int]]:
    return [(_scope(block), value) for value in block.hashes]


_steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["stored", "removed"]), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.sampled_from(["clear", "flush", "subscribe"]), st.integers(0, 2), st.just(0)),
    ),
    max_size=60,
)


@given(_steps)
def test_every_reader_knows_what_is_present_whenever_it_subscribed(steps: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        hub = EventHub(BOOT_ID, on_dirty=lambda: None)
        present: set[tuple[Scope, int]] = set()
        readers: list[Reader] = []
        for action, number, value in steps:
            scope = SCOPES[number]
            if action == "stored":
                present.add((scope, value))
                hub.change(scope, value, stored=True)
            elif action == "removed":
                present.discard((scope, value))
                hub.change(scope, value, stored=False)
            elif action == "clear":
                present = {entry for entry in present if entry[0] != scope}
                hub.clear([scope])
            elif action == "flush":
                hub.flush()
            else:
                blocks = [(scope, [value for other, value in present if other == scope]) for scope in SCOPES]
                subscriber = hub.subscribe([], blocks)
                assert subscriber is not None
                readers.append(Reader(subscriber))
        hub.flush()
        for reader in readers:
            await reader.catch_up()
            assert reader.ready
            assert reader.present == present
            assert reader.seq == hub.seq

    asyncio.run(scenario())


def test_reader_that_falls_behind_is_closed_not_served_with_a_gap() -> None:
    async def scenario() -> None:
        hub = EventHub(BOOT_ID, on_dirty=lambda: None)
        slow, quick = hub.subscribe([], []), hub.subscribe([], [])
        assert slow is not None
        assert quick is not None
        rounds = 0
        while not slow.closed:
            rounds += 1
            engines = [wire.EngineInfo(f"e{n}", "x" * 400_000, 0, [], 16, "", b"", [], True) for n in range(20)]
            for info in engines:
                hub.engine(info)
            hub.flush()
            while await quick.next(0):
                pass
            assert rounds * 20 * 400_000 < 2 * QUEUE_MAX_BYTES
        assert await slow.next(0) is None
        assert not quick.closed
        assert (len(hub), hub.overflows) == (1, 1)

    asyncio.run(scenario())


def test_frame_that_comes_with_the_timeout_is_not_left_behind_a_sign_of_life() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        for _round in range(20):
            subscriber = Subscriber([])
            waiting = asyncio.ensure_future(subscriber.next(0.002))
            await asyncio.sleep(0)
            loop.call_later(0.0021, subscriber.push, b"frame")
            time.sleep(0.004)  # noqa: ASYNC251 the loop stalls, so that timeout and frame come in one turn
            assert await waiting == b"frame"

    asyncio.run(run())


def test_engine_changes_travel_in_deltas() -> None:
    async def scenario() -> None:
        hub = EventHub(BOOT_ID, on_dirty=lambda: None)
        subscriber = hub.subscribe([], [])
        assert subscriber is not None
        info = wire.EngineInfo("e", "127.0.0.1:1", 0, ["m"], 16, "seed", b"", [], True)
        hub.engine(info)
        hub.flush()
        frames = FrameDecoder()
        messages: list[wire.StreamMessage] = []
        while frame := await subscriber.next(0):
            messages += [wire.decode_stream_message(body) for body in frames.feed(frame)]
        delta = messages[-1]
        assert isinstance(delta, wire.EventsDelta)
        assert delta.engines == [info]

    asyncio.run(scenario())


_events = st.lists(st.tuples(st.sampled_from("sssrrc"), st.integers(0, 1), st.integers(0, 3)), max_size=40)


@given(_events, _events)
def test_gpu_block_is_present_while_its_count_is_positive(
    first: list[tuple[str, int, int]], second: list[tuple[str, int, int]]
) -> None:
    blocks = GpuBlocks()
    counts: dict[tuple[int, int], int] = {}
    told: set[tuple[int, int]] = set()
    for events in (first, second):
        for kind, group, value in events:
            if kind == "c":
                counts.clear()
            else:
                counts[group, value] = max(0, counts.get((group, value), 0) + (1 if kind == "s" else -1))
        kinds = "".join(kind for kind, _group, _value in events)
        for changes in blocks.apply(kinds, [event[1] for event in events], [event[2] for event in events]):
            if changes.cleared:
                told.clear()
            for block, is_present in changes.blocks.items():
                told.add(block) if is_present else told.discard(block)
        expected = {block for block, count in counts.items() if count}
        assert told == expected == set(blocks.present())


def test_gpu_snapshot_replaces_what_was_known_and_reports_the_difference() -> None:
    blocks = GpuBlocks()
    blocks.apply("ss", [0, 0], [1, 2])
    changes = blocks.replace([0, 0], [2, 3], [2, 1])
    assert changes.blocks == {(0, 1): False, (0, 3): True}
    assert [portion.blocks for portion in blocks.apply("r", [0], [2])] == [{}]  # one of two is left
    assert [portion.blocks for portion in blocks.apply("r", [0], [2])] == [{(0, 2): False}]


def test_what_a_former_process_told_of_valkey_is_withdrawn_too() -> None:
    """A router goes on with the former process's hints; the present one has never heard of these blocks."""
    keys = [BlockKey(b"d" * 16, 0, number.to_bytes(32, "big")) for number in range(3)]
    short = [short_hash(key.block_hash) for key in keys]
    told = wire.TierBlocks("valkey", "", b"d" * 16, 0, short)
    group = wire.GroupLayout(0, 4096, 16, 0)
    info = wire.EngineInfo("e", "127.0.0.1:1", 0, ["m"], 16, "seed", b"d" * 16, [group], True)
    fleet = FleetIndex(PrefixIndex(100), ["agent"])
    view = fleet.new_view("agent", b"former")
    view.put_engine(info)
    view.store(told)
    fleet.commit("agent", view, b"former")

    async def deltas() -> list[wire.EventsDelta]:
        hub = EventHub(BOOT_ID, on_dirty=lambda: None)
        feed = EventFeed(hub, ValkeyHints(), AgentMetrics(CollectorRegistry()))
        subscriber = hub.subscribe([], [])
        assert subscriber is not None
        feed.hint("removed", keys[0])
        hub.flush()
        feed.hint("cleared", None)
        decoder, found = FrameDecoder(), []
        while frame := await subscriber.next(0):
            found += [wire.decode_stream_message(body) for body in decoder.feed(frame)]
        return [message for message in found if isinstance(message, wire.EventsDelta)]

    removed, cleared = asyncio.run(deltas())
    view = fleet.new_view("agent", BOOT_ID)
    view.put_engine(info)
    fleet.commit("agent", view, BOOT_ID)

    def known() -> list[bool]:
        *_, valkey = fleet.holder_masks(fleet.engines_at("127.0.0.1:1", "")[0], shared_tiers=True)
        return [bool(mask & valkey) for mask in fleet.index.masks(short)]

    assert known() == [True, True, True]
    for blocks in removed.removed:
        fleet.remove("agent", blocks)
    assert known() == [False, True, True]
    for blocks in cleared.cleared:
        fleet.clear("agent", blocks)
    assert known() == [False, False, False]


def test_hint_that_is_forgotten_for_want_of_room_is_not_told_of_as_gone() -> None:
    """What one agent misses in Valkey is a miss for all; what it only forgets, the others still hold."""

    async def deltas() -> list[wire.EventsDelta]:
        hub = EventHub(BOOT_ID, on_dirty=lambda: None)
        feed = EventFeed(hub, ValkeyHints(limit=1), AgentMetrics(CollectorRegistry()))
        subscriber = hub.subscribe([], [])
        assert subscriber is not None
        for number in range(3):
            feed.hint("stored", BlockKey(b"d" * 16, 0, number.to_bytes(32, "big")))
        hub.flush()
        decoder, found = FrameDecoder(), []
        while frame := await subscriber.next(0):
            found += [wire.decode_stream_message(body) for body in decoder.feed(frame)]
        return [message for message in found if isinstance(message, wire.EventsDelta)]

    [delta] = asyncio.run(deltas())
    assert (sum(len(blocks.hashes) for blocks in delta.stored), delta.removed, delta.cleared) == (3, [], [])


def test_hints_forget_the_oldest_beyond_their_limit() -> None:
    hints = ValkeyHints(limit=2)
    domain = b"d" * 16
    for group, block_hash in ((0, b"1"), (0, b"2"), (0, b"1"), (1, b"3")):
        hints.add(domain, group, block_hash)
    assert dict(hints.by_place()) == {(domain, 0): [b"1"], (domain, 1): [b"3"]}
    for _ in range(2):
        hints.remove(domain, 0, b"1")
        assert (hints.has(domain, 0, b"1"), hints.has(domain, 1, b"3"), len(hints)) == (False, True, 1)
    hints.clear()
    assert len(hints) == 0
