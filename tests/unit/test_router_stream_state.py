"""Only the next message of one agent process is ever passed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_core.wire import EventsAlive, EventsBegin, EventsDelta, EventsPart, EventsReady, StreamMessage
from kvpool_router.stream_state import BOOT_ID, GAP, OUT_OF_ORDER, StreamBrokenError, StreamOrder

BEGIN = EventsBegin(0, b"a", 7)
PART = EventsPart(0, [], [])
READY = EventsReady(0)


def delta(seq: int, boot_id: bytes = b"a") -> EventsDelta:
    return EventsDelta(0, boot_id, seq, [], [], [], [])


def feed(*messages: StreamMessage) -> StreamOrder:
    order = StreamOrder()
    for message in messages:
        order.check(message)
    return order


def test_stream_in_order_is_passed_on() -> None:
    assert feed(BEGIN, PART, PART, READY, delta(8), EventsAlive(0, b"a", 8), delta(9)).seq == 9
    assert feed(BEGIN, READY).ready


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([PART], OUT_OF_ORDER),
        ([READY], OUT_OF_ORDER),
        ([delta(1)], OUT_OF_ORDER),
        ([EventsBegin(0, b"", 0)], OUT_OF_ORDER),
        ([BEGIN, BEGIN], OUT_OF_ORDER),
        ([BEGIN, delta(8)], OUT_OF_ORDER),
        ([BEGIN, READY, PART], OUT_OF_ORDER),
        ([BEGIN, READY, READY], OUT_OF_ORDER),
        ([BEGIN, READY, delta(9)], GAP),
        ([BEGIN, READY, delta(7)], GAP),
        ([BEGIN, READY, delta(8), delta(8)], GAP),
        ([BEGIN, READY, EventsAlive(0, b"a", 8)], GAP),
        ([BEGIN, READY, delta(8, b"b")], BOOT_ID),
        ([BEGIN, READY, EventsAlive(0, b"b", 7)], BOOT_ID),
    ],
)
def test_anything_else_breaks_the_stream(messages: list[StreamMessage], reason: str) -> None:
    order = feed(*messages[:-1])
    with pytest.raises(StreamBrokenError) as error:
        order.check(messages[-1])
    assert error.value.reason == reason


MESSAGES = st.sampled_from([BEGIN, PART, READY, *map(delta, range(7, 11)), EventsAlive(0, b"a", 8), delta(8, b"b")])


@given(st.lists(MESSAGES, max_size=8))
def test_deltas_that_pass_have_no_gap(messages: list[StreamMessage]) -> None:
    order, passed = StreamOrder(), []
    try:
        for message in messages:
            order.check(message)
            if isinstance(message, EventsDelta):
                passed.append(message.seq)
    except StreamBrokenError:
        pass
    assert passed == list(range(8, 8 + len(passed)))
